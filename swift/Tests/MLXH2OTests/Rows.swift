import Foundation
import MLX

@testable import MLXH2O

/// Whether this is `make test`, which sets MLX_H2O_STEP and leaves most cases to `make test-all`.
let isQuick = ProcessInfo.processInfo.environment["MLX_H2O_STEP"] != nil

/// All of some cases, or every `step`-th where ``isQuick``.
func sampled<Case>(_ cases: [Case], step: Int) -> [Case] {
    isQuick ? stride(from: 0, to: cases.count, by: step).map { cases[$0] } : cases
}

/// A seeded stream of queries, keys and values for one layer.
struct RowStream {
    let queries: MLXArray
    var keys: MLXArray
    let values: MLXArray

    init(
        seed: Int = 1, batch: Int = 1, heads: Int = 4, kvHeads: Int = 2, tokens: Int,
        width: Int = 32, valueWidth: Int? = nil, dtype: DType = .float32
    ) {
        let numbers = GoldenCase(
            group: "", name: "", parameters: .object(["seed": .int(seed)]))
        queries = numbers.tensor(.q, [batch, heads, tokens, width], dtype: dtype)
        keys = numbers.tensor(.k, [batch, kvHeads, tokens, width], dtype: dtype)
        values = numbers.tensor(
            .v, [batch, kvHeads, tokens, valueWidth ?? width], dtype: dtype)
    }

    /// The outputs of a cache for chunks of so many tokens, from its offset on.
    @discardableResult
    func run(_ cache: H2OKVCache, _ chunks: [Int], sinks: MLXArray? = nil) -> MLXArray {
        joined(
            chunks.map { length in
                let range = cache.offset ..< cache.offset + length
                let output = h2oAttention(
                    queries: queries[0..., 0..., range], keys: keys[0..., 0..., range],
                    values: values[0..., 0..., range], cache: cache, scale: 0.18,
                    mask: cache.makeMask(n: length, windowSize: nil, returnArray: false),
                    sinks: sinks)
                eval(output)
                return output
            }, axis: 2)
    }
}

/// A place for a file that only this test knows.
func temporaryFile() -> URL {
    FileManager.default.temporaryDirectory
        .appendingPathComponent("\(UUID().uuidString).safetensors")
}

extension MLXArray {
    /// `[..., 1]`
    var column: MLXArray { expandedDimensions(axis: -1) }

    var float32: MLXArray { asType(.float32) }
}

/// Integers `range` as an int32 vector.
func positions(_ range: Range<Int>) -> MLXArray {
    MLXArray(Int32(range.lowerBound) ..< Int32(range.upperBound))
}

/// Arrays one after the other along an axis; a single one as it is.
func joined(_ arrays: [MLXArray], axis: Int) -> MLXArray {
    arrays.count == 1 ? arrays[0] : concatenated(arrays, axis: axis)
}

/// So many decode steps.
func ones(_ count: Int) -> [Int] { Array(repeating: 1, count: count) }

/// Whether two arrays are the same numbers.
func same(_ a: MLXArray, _ b: MLXArray) -> Bool {
    a.shape == b.shape && a.dtype == b.dtype
        && a.asType(.float32).asArray(Float.self) == b.asType(.float32).asArray(Float.self)
}

extension H2OKVCache {
    /// Slots of each head without memory pressure, once known.
    var fullBudgets: [Int]? { pressure.full?.left(settings.filling.count).budgets }

    /// Whether kernels have the rows.
    var isDecoding: Bool { engine?.isFused ?? false }

    /// Every array held, by name, names ascending.
    var namedArrays: [(name: String, array: MLXArray)] {
        try! saved().arrays.sorted { $0.key < $1.key }.map { (name: $0.key, array: $0.value) }
    }

    /// Everything else, in the form that Python's `H2OKVCache.config` has.
    var configuration: H2OSettingValue { try! H2OSettingValue(parsing: saved().settings) }

    /// What the slots of each KV head store by this name, `[B, length, ...]`, in order of position; empty
    /// where nothing is.
    func stored(_ name: String) -> [MLXArray] {
        let arrays = Dictionary(uniqueKeysWithValues: namedArrays.map { ($0.name, $0.array) })
        guard let field = arrays["slots.\(name)"], let places = arrays["slots.positions"],
            let runs = configuration["runs"]?.array
        else { return [] }
        return runs.flatMap { run in
            let (start, length) = (run["start"]!.int!, run["length"]!.int!)
            return (0 ..< run["last"]!.int! - run["first"]!.int!).map { head in
                let first = start + head * run["allocated"]!.int!
                let own = first ..< first + length
                var order = argSort(places[0..., own].asType(.int32), axis: -1)
                let rows = field[0..., own]
                if rows.ndim == 3 { order = broadcast(order.column, to: rows.shape) }
                return takeAlong(rows, order, axis: 1)
            }
        }
    }
}

/// A cache of one layer, whose slots a configuration counts for rows as ``RowStream`` has them.
func plannedCache(
    _ budget: H2OConfiguration.Budget, policy: any H2OPolicy = H2OPolicies.Salient(),
    packing: H2OPacking, undo: Int = 0
) throws -> H2OKVCache {
    let configuration = try H2OConfiguration(
        budget: budget, policy: policy, packing: packing, undo: undo)
    let widths = RowWidths(key: 32, value: 32, keySize: 4, valueSize: 4)
    let kind = LayerKind(heads: 2, group: 2, widths: widths, attends: true)
    let settings = try configuration.settings(of: [kind], nil, policy, true, nil)
    return try H2OKVCache(settings[0], PressureShare(nil, nil))
}
