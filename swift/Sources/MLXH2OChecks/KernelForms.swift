import MLX
import MLXH2O

/// A layer and its calls, as far as they decide which texts the kernels compile: those that
/// `mlx_h2o doctor` has (python/mlx_h2o/doctor/variants.py).
struct KernelForm {
    let policy: any H2OPolicy
    let dtype: DType
    let widths: (keys: Int, values: Int)
    let bits: (keys: Int?, values: Int?)
    /// Query heads of a KV head.
    let group: Int
    let remainder, framed, sinks: Bool

    private static let kvHeads = 2
    private static let groupSize = 32
    // A prompt, in which kernels score it, and steps beyond the budget.
    private static let prompt = 40, budget = 24, steps = 3

    /// Every two choices occur together in one of them.
    static func all() throws -> [KernelForm] {
        let policies: [any H2OPolicy] = try [
            ("salient", [:]), ("h2o", [:]),
            ("h2o", ["age_normalised": .bool(true), "evict_every": .int(3)]),
            ("ema", ["unit": .string("layer")]), ("ema-logits", [:]), ("tova", [:]),
            ("streaming", [:]), ("keydiff", [:]), ("distinct", [:]),
            ("distinct", ["unit": .string("layer")]), ("h2o", ["value_weighted": .bool(true)]),
        ].map { (name: String, settings: [String: H2OSettingValue]) in
            try H2OPolicies.make(name, settings: settings)
        }
        let dtypes = [DType.float32, .float16, .bfloat16]
        let widths = [(64, 64), (128, 128), (96, 96), (192, 128), (576, 512)]
        let bits: [(Int?, Int?)] = [
            (nil, nil), (8, 8), (6, 6), (5, 5), (4, 4), (3, 3), (2, 2), (8, 4),
        ]
        let groups = [1, 4, 8]
        let sizes = [policies.count, dtypes.count, widths.count, bits.count, groups.count, 2, 2, 2]
        return pairsCovered(sizes).map { c in
            KernelForm(
                policy: policies[c[0]], dtype: dtypes[c[1]], widths: widths[c[2]], bits: bits[c[3]],
                group: groups[c[4]], remainder: c[5] == 0,
                framed: c[6] == 1 && bits[c[3]].0 != nil, sinks: c[7] == 1)
        }
    }

    /// A short conversation, in which the kernels of this form are used, and so prove themselves.
    func run() throws {
        let packing = try H2OPacking(
            keyBits: bits.keys, valueBits: bits.values, groupSize: Self.groupSize)
        func frame(_ number: Float) -> [[Float]] {
            Array(repeating: Array(repeating: number, count: widths.keys), count: Self.kvHeads)
        }
        let cache = try H2OKVCache(
            Array(repeating: Self.budget, count: Self.kvHeads), policy: policy,
            remainder: remainder, packing: packing,
            frame: framed ? H2OFrame(centre: frame(0), scale: frame(1)) : nil)
        let heads = Self.kvHeads * group
        for length in [Self.prompt] + Array(repeating: 1, count: Self.steps) {
            let keys = MLXArray.ones([1, Self.kvHeads, length, widths.keys], dtype: dtype)
            let queries = MLXArray.ones([1, heads, length, widths.keys], dtype: dtype)
            let values = MLXArray.ones([1, Self.kvHeads, length, widths.values], dtype: dtype)
            eval(
                h2oAttention(
                    queries: queries, keys: keys, values: values, cache: cache,
                    scale: 0.1, mask: length > 1 ? .causal : .none,
                    sinks: sinks ? MLXArray.zeros([heads], dtype: dtype) : nil))
        }
    }
}
