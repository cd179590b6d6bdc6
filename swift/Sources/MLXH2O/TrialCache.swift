import MLX
import MLXLMCommon

/// What a trial step told about a plain KV cache of a model.
struct LayerKind: Sendable {
    /// Hk.
    let heads: Int
    /// Query heads of a KV head.
    let group: Int
    private(set) var widths: RowWidths
    /// Whether the model asked the cache to attend.
    let attends: Bool

    /// The same with rows that are stored so.
    func stored(_ packing: H2OPacking, isFramed: Bool) -> LayerKind {
        var kind = self
        (kind.widths.packing, kind.widths.isFramed) = (packing, isFramed)
        return kind
    }

    /// The same with a file of its rows.
    func filed(_ file: FileBytes) -> LayerKind {
        var kind = self
        kind.widths.file = file
        return kind
    }

    /// The same while positions fit into few bits.
    var narrow: LayerKind {
        var kind = self
        kind.widths = widths.narrow
        return kind
    }
}

/// What a trial step told about a model.
struct TrialResult {
    /// How the model attends to each of its plain caches, members of a `CacheList` too; nil for other
    /// caches.
    let kinds: [LayerKind?]
    /// Whether a mask that a plain cache makes may be given to a layer with a cache of another kind,
    /// which holds other rows.
    let mayShareMasks: Bool
    /// The RoPE of the keys where positions are to roll, or why they cannot.
    let rope: Result<H2ORope?, any Error>
}

/// A cache for one step, in the place of a plain one or of a window, that notes what the model does
/// with it.
final class TrialCache: AttendingKVCache {
    /// How the model attends; nil while it has not.
    private(set) var kind: LayerKind?
    /// Whether the model asked for a sliding window's mask.
    private(set) var isWindowed = false
    /// Whether the model asked for masks at all.
    private(set) var makesMasks = false
    /// Whether the model reads the rows otherwise than by attending (layers that share them).
    private(set) var isRead = false

    let attends = true
    var offset = 0
    let maxSize: Int?
    var metaState: [String] = []
    let isTrimmable = false
    private var rows: [MLXArray] = []

    /// The keys `[B, Hk, L, D]` that came last.
    var keys: MLXArray? { rows.first }

    init(maxSize: Int? = nil, at offset: Int = 0) {
        (self.maxSize, self.offset) = (maxSize, offset)
    }

    var state: [MLXArray] {
        get {
            isRead = true
            return rows
        }
        set { rows = newValue }
    }

    func innerState() -> [MLXArray] { [] }
    func trim(_ n: Int) -> Int { 0 }
    func copy() -> any KVCache { TrialCache(maxSize: maxSize) }

    private func note(_ keys: MLXArray, _ values: MLXArray, queries: MLXArray?) {
        rows = [keys, values]
        kind = LayerKind(
            heads: keys.dim(1), group: queries.map { $0.dim(1) / keys.dim(1) } ?? 1,
            widths: RowWidths(
                key: keys.dim(3), value: values.dim(3), keySize: keys.dtype.size,
                valueSize: values.dtype.size),
            attends: queries != nil)
    }

    func update(keys: MLXArray, values: MLXArray) -> (MLXArray, MLXArray) {
        note(keys, values, queries: nil)
        return (keys, values)
    }

    func attend(
        queries: MLXArray, keys: MLXArray, values: MLXArray, scale: Float,
        mask: MLXFast.ScaledDotProductAttentionMaskMode, sinks: MLXArray?
    ) -> MLXArray {
        note(keys, values, queries: queries)
        return MLXFast.scaledDotProductAttention(
            queries: queries, keys: keys, values: values, scale: scale, mask: mask,
            sinks: sinks?.asType(queries.dtype))
    }

    func makeMask(
        n: Int, windowSize: Int?, returnArray: Bool
    ) -> MLXFast.ScaledDotProductAttentionMaskMode {
        makesMasks = true
        isWindowed = isWindowed || windowSize != nil
        return .none
    }
}

extension H2OConfiguration {
    /// What a step with these caches tells, which are of no use afterwards.
    func trial(of model: any LanguageModel, with plain: [any KVCache]) throws -> TrialResult {
        let members = placedMembers(of: plain).map(\.cache)
        // Caches of other kinds are what the model takes them for, and cannot be watched.
        let trials = members.map { cache in
            type(of: cache) == KVCacheSimple.self || type(of: cache) == RotatingKVCache.self
                ? TrialCache(maxSize: cache.maxSize) : nil
        }
        let tried = trials.compactMap { $0 }.filter { $0.maxSize == nil }
        guard !tried.isEmpty else {
            return TrialResult(
                kinds: members.map { _ in nil }, mayShareMasks: false, rope: .success(nil))
        }
        let caches = replacingMembers(of: plain, with: zip(members, trials).map { $1 ?? $0 })
        let output = model(
            LMInput.Text(tokens: MLXArray([0] as [Int32], [1, 1])), cache: caches, state: nil)
        eval(output.logits)
        let name = String(describing: type(of: model))
        if tried.contains(where: \.isWindowed) {
            throw H2OError.partial(
                "\(name) masks a sliding window over a full cache, which a bounded cache cannot serve."
            )
        }
        if tried.contains(where: \.isRead) {
            throw H2OError.partial(
                "\(name) reads the rows of its caches by itself, which a bounded cache cannot serve."
            )
        }
        let stock = tried.contains { $0.kind?.attends == false }
        if stock && !tried.contains(where: \.makesMasks) {
            throw H2OError.partial(
                "\(name) makes its masks without asking its caches, which a bounded cache cannot "
                    + "serve.")
        }
        let windows = trials.compactMap { $0 }.filter { $0.maxSize != nil }
        // A state of fixed size has no rows to mask.
        let unwatched = zip(members, trials).contains { $1 == nil && !($0 is ArraysCache) }
        let kinds = trials.map { $0?.maxSize == nil ? $0?.kind : nil }
        let attends = kinds.compactMap { $0 }.allSatisfy(\.attends)
        return TrialResult(
            kinds: kinds,
            mayShareMasks: unwatched
                || !windows.isEmpty && !windows.contains(where: \.makesMasks),
            rope: Result { try rope(of: model, attends: attends) })
    }
}
