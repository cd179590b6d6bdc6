import Foundation
import MLX
import MLXH2O
import MLXLMCommon

// How much of a decode step of the embedded model is H2OKVCache's own code: everything that happens
// in Swift and in the C calls that it makes before anything is computed. What Swift costs over the
// C calls alone is a part of that.

/// A bounded cache that notes how long building its part of the graph takes.
final class TimedCache: AttendingKVCache {
    let cache: H2OKVCache
    var seconds = 0.0

    init(_ cache: H2OKVCache) { self.cache = cache }

    var attends: Bool { cache.attends }
    var offset: Int { cache.offset }
    var maxSize: Int? { cache.maxSize }
    var state: [MLXArray] {
        get { cache.state }
        set { cache.state = newValue }
    }
    var metaState: [String] {
        get { cache.metaState }
        set { cache.metaState = newValue }
    }
    var isTrimmable: Bool { cache.isTrimmable }
    func trim(_ n: Int) -> Int { cache.trim(n) }
    func innerState() -> [MLXArray] { cache.innerState() }
    func copy() -> any KVCache { TimedCache(cache.copy() as! H2OKVCache) }

    func makeMask(
        n: Int, windowSize: Int?, returnArray: Bool
    ) -> MLXFast.ScaledDotProductAttentionMaskMode {
        cache.makeMask(n: n, windowSize: windowSize, returnArray: returnArray)
    }

    func update(keys: MLXArray, values: MLXArray) -> (MLXArray, MLXArray) {
        cache.update(keys: keys, values: values)
    }

    func attend(
        queries: MLXArray, keys: MLXArray, values: MLXArray, scale: Float,
        mask: MLXFast.ScaledDotProductAttentionMaskMode, sinks: MLXArray?
    ) -> MLXArray {
        let start = DispatchTime.now().uptimeNanoseconds
        defer { seconds += Double(DispatchTime.now().uptimeNanoseconds - start) * 1e-9 }
        return cache.attend(
            queries: queries, keys: keys, values: values, scale: scale, mask: mask, sinks: sinks)
    }
}

let folder = URL(
    fileURLWithPath: CommandLine.arguments.dropFirst().first
        ?? "python/mlx_h2o/data/recall-4m")
let model = try H2OModels.load(folder: folder, dtype: .float32)
let steps = 300
for (name, policy, packing) in [
    ("distinct", H2OPolicies.Distinct() as any H2OPolicy, H2OPacking.dense),
    ("h2o", H2OPolicies.H2O(), .dense),
    ("streaming", H2OPolicies.Streaming(), .dense),
    ("distinct, 8 bits", H2OPolicies.Distinct(), try H2OPacking(keyBits: 8, valueBits: 8)),
] {
    let configuration = try H2OConfiguration(
        budget: .tokens(256), policy: policy, packing: packing)
    let caches = try configuration.caches(for: model).map { TimedCache($0 as! H2OKVCache) }
    var token = MLXArray((0 ..< Int32(400)).map { $0 % 4000 }, [1, 400])
    func step() {
        let logits = model(token, cache: caches)
        token = argMax(logits[0..., -1], axis: -1).asType(.int32).reshaped([1, 1])
        eval(token)
    }
    for _ in 0 ..< 20 { step() }
    for cache in caches { cache.seconds = 0 }
    let start = DispatchTime.now().uptimeNanoseconds
    for _ in 0 ..< steps { step() }
    let whole = Double(DispatchTime.now().uptimeNanoseconds - start) * 1e-9
    let own = caches.reduce(0) { $0 + $1.seconds }
    print(
        name,
        String(
            format: "%.2f ms a step, of which the cache's code and its C calls %.3f ms (%.1f %%)",
            whole / Double(steps) * 1e3, own / Double(steps) * 1e3, 100 * own / whole))
}
