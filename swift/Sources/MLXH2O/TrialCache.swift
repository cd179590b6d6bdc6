import MLX
import MLXLMCommon

/// What a trial step told about a plain KV cache of a model.
struct LayerKind: Sendable {
    /// Hk.
    let heads: Int
    let widths: RowWidths
    /// Whether the model asked the cache to attend.
    let attends: Bool
}

/// A plain cache for one step that notes what the model does with it.
final class TrialCache: AttendingKVCache {
    /// How the model attends; nil while it has not.
    private(set) var kind: LayerKind?
    /// Whether the model asked for a sliding window's mask.
    private(set) var isWindowed = false
    /// Whether the model asked for masks at all.
    private(set) var isAskedForMasks = false
    /// Whether the model reads the rows otherwise than by attending (layers that share them).
    private(set) var isRead = false

    let attends = true
    var offset = 0
    let maxSize: Int? = nil
    var metaState: [String] = []
    let isTrimmable = false
    private var rows: [MLXArray] = []

    var state: [MLXArray] {
        get {
            isRead = true
            return rows
        }
        set { rows = newValue }
    }

    func innerState() -> [MLXArray] { [] }
    func trim(_ n: Int) -> Int { 0 }
    func copy() -> any KVCache { TrialCache() }

    private func note(_ keys: MLXArray, _ values: MLXArray, attends: Bool) {
        rows = [keys, values]
        kind = LayerKind(
            heads: keys.dim(1),
            widths: RowWidths(
                key: keys.dim(3), value: values.dim(3), keySize: keys.dtype.size,
                valueSize: values.dtype.size),
            attends: attends)
    }

    func update(keys: MLXArray, values: MLXArray) -> (MLXArray, MLXArray) {
        note(keys, values, attends: false)
        return (keys, values)
    }

    func attend(
        queries: MLXArray, keys: MLXArray, values: MLXArray, scale: Float,
        mask: MLXFast.ScaledDotProductAttentionMaskMode, sinks: MLXArray?
    ) -> MLXArray {
        note(keys, values, attends: true)
        return MLXFast.scaledDotProductAttention(
            queries: queries, keys: keys, values: values, scale: scale, mask: mask,
            sinks: sinks?.asType(queries.dtype))
    }

    func makeMask(
        n: Int, windowSize: Int?, returnArray: Bool
    ) -> MLXFast.ScaledDotProductAttentionMaskMode {
        isAskedForMasks = true
        isWindowed = isWindowed || windowSize != nil
        return .none
    }
}
