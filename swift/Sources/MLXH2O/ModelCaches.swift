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

extension H2OConfiguration {
    // A head of a profile that could only choose among one or two tokens would choose nothing.
    private static let fewestChoices = 4

    /// The model's own caches, with every plain KV cache replaced by a bounded one.
    ///
    /// Runs the model for one token to see how it attends. Sliding-window and state-space caches
    /// stay as the model made them.
    ///
    /// - Parameter model: Any model of mlx-swift-lm, or your own.
    /// - Throws: ``H2OError``: a policy that this model cannot run, a budget without room to evict, a
    ///   profile of another model, or a layer that cannot be bounded.
    public func caches(for model: any LanguageModel) throws -> [any KVCache] {
        let plain = try plainCaches(of: model)
        return try caches(for: model, plain: plain, kinds: layerKinds(of: model, plain: plain))
    }

    /// The model's own caches, without a bound.
    func plainCaches(of model: any LanguageModel) throws -> [any KVCache] {
        if let model = model as? any H2OModel { return model.plainCaches() }
        return try model.newCache(parameters: nil)
    }

    /// The same, knowing how the model attends.
    func caches(
        for model: any LanguageModel, plain: [any KVCache], kinds: [LayerKind?]
    ) throws -> [any KVCache] {
        let name = String(describing: type(of: model))
        if compatibility == .requireAllLayers {
            for (layer, (cache, kind)) in zip(plain, kinds).enumerated()
            where kind == nil && !isBoundedItself(cache) {
                throw H2OError.partial(
                    "Layer \(layer) of \(name) has a \(type(of: cache)), which cannot be bounded: "
                        + "pass compatibility: .allowPartial to leave it as it is.")
            }
        }
        let bounded = kinds.compactMap { $0 }
        guard !bounded.isEmpty else {
            throw H2OError.partial("\(name) has no plain KV cache to bound.")
        }
        let attends = bounded.allSatisfy(\.attends)
        let policy = policy ?? (attends ? Distinct() : Distinct.keysOnly)
        if !attends && policy.needsAttention {
            throw H2OError.policyNeedsAttention(policy: type(of: policy).name, model: name)
        }
        if !attends && packing.packs {
            throw H2OError.configuration(
                "\(name) attends by itself and cannot read packed keys and values.")
        }
        var budgets = try sharedOut(model, bounded, policy: policy, attends: attends).makeIterator()
        return try zip(plain, kinds).map { cache, kind in
            guard kind != nil else { return cache }
            return try H2OKVCache(
                .heads(budgets.next()!), policy: policy, remainder: remainder, attends: attends,
                packing: packing, pressure: pressure)
        }
    }

    /// Slots per bounded layer and head.
    private func sharedOut(
        _ model: any LanguageModel, _ kinds: [LayerKind], policy: any Policy, attends: Bool
    ) throws -> [[Int]] {
        let remembers = remainder || type(of: policy).usesEvictedMean
        let uniform = !attends || policy.options.unit == .layer
        let profile = try uniform ? nil : profile(of: model, kinds)
        let least = policy.leastBudget + Self.fewestChoices
        var sizes = try kinds.enumerated().map { layer, kind in
            var widths = kind.widths
            widths.packing = packing
            let mean: Int
            switch budget {
            case .tokens(let count): mean = count - widths.remainderSlots(remembers)
            case .bytes(let bytes):
                mean = try widths.slots(
                    bytes: bytes / kinds.count, heads: kind.heads, policy: policy,
                    remembers: remembers)
            }
            guard let profile else { return Array(repeating: mean, count: kind.heads) }
            return try profile.budgets(mean: mean, least: least)[layer]
        }
        if !attends {
            // One mask serves all layers, so all must hold the same number of tokens.
            let fewest = sizes.flatMap { $0 }.min()!
            sizes = sizes.map { Array(repeating: fewest, count: $0.count) }
        }
        return sizes
    }

    private func profile(of model: any LanguageModel, _ kinds: [LayerKind]) throws -> Profile? {
        let candidates: [Profile]
        switch headBudgets {
        case .uniform: return nil
        case .profile(let profile): candidates = [profile]
        case .matching(let profiles): candidates = profiles
        }
        guard let model = model as? any ProfiledModel else {
            if case .matching = headBudgets { return nil }
            throw H2OError.profile(
                "A profile needs a model that conforms to ProfiledModel; use uniform budgets.")
        }
        let rows = model.embedded(MLXArray([1, 2, 3, 4] as [Int32])).asType(.float32)
        let identity = ModelIdentity(
            modelType: model.modelType, kvHeads: kinds.map(\.heads),
            keyWidths: kinds.map(\.widths.key), vocabularySize: model.vocabularySize,
            probe: rows.slicedLast(0 ..< min(16, rows.dim(-1))).asArray(Float.self).map(Double.init)
        )
        if case .profile(let profile) = headBudgets { try profile.require(identity) }
        return candidates.first { $0.model.difference(from: identity) == nil }
    }

    /// How the model attends to each of its plain caches; nil for other caches.
    func layerKinds(of model: any LanguageModel, plain: [any KVCache]) throws -> [LayerKind?] {
        let trials = plain.map { type(of: $0) == KVCacheSimple.self ? TrialCache() : nil }
        let caches = zip(plain, trials).map { cache, trial in trial ?? cache.copy() }
        let output = model(
            LMInput.Text(tokens: MLXArray([0] as [Int32], [1, 1])), cache: caches, state: nil)
        eval(output.logits)
        if trials.contains(where: { $0?.windowed == true }) {
            throw H2OError.partial(
                "\(type(of: model)) masks a sliding window over a full cache, which a bounded cache "
                    + "cannot serve.")
        }
        return trials.map { $0?.kind }
    }

    /// Whether a cache's memory has a bound of its own: a window, or a state of fixed size.
    private func isBoundedItself(_ cache: any KVCache) -> Bool {
        cache.maxSize != nil
            || ["MambaCache", "ArraysCache"].contains(String(describing: type(of: cache)))
    }
}

/// A plain cache for one step that notes how the model attends to it.
private final class TrialCache: AttendingKVCache {
    var kind: LayerKind?
    var windowed = false
    let attends = true
    var offset = 0
    let maxSize: Int? = nil
    var state: [MLXArray] = []
    var metaState: [String] = []
    let isTrimmable = false

    func innerState() -> [MLXArray] { [] }
    func trim(_ n: Int) -> Int { 0 }
    func copy() -> any KVCache { TrialCache() }

    private func note(_ keys: MLXArray, _ values: MLXArray, attends: Bool) {
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
        windowed = windowed || windowSize != nil
        return .none
    }
}

/// One entry of a model's cache list.
public struct LayerDescription: Sendable, CustomStringConvertible {
    /// Its place in the list.
    public let layer: Int
    /// The cache's class.
    public let kind: String
    /// Whether its memory is bounded by this library.
    public let isBounded: Bool
    /// Why, or why not.
    public let reason: String
    /// Slots per KV head of a bounded cache, once known.
    public let budgets: [Int]?
    /// Bytes held now.
    public let nbytes: Int

    public var description: String {
        "layer \(layer): \(kind), \(isBounded ? "bounded" : "left as it is"): \(reason) "
            + "(\(nbytes) bytes)"
    }
}

/// Per layer what is bounded and what is not, and why.
public func describe(_ caches: [any KVCache]) -> [LayerDescription] {
    caches.enumerated().map { layer, cache in
        let kind = String(describing: type(of: cache))
        guard let cache = cache as? H2OKVCache else {
            let reason =
                cache.maxSize.map { "the model's own window of \($0) tokens" }
                ?? "a cache of the model's own kind"
            let bytes = cache.innerState().reduce(0) { $0 + $1.nbytes }
            return LayerDescription(
                layer: layer, kind: kind, isBounded: false, reason: reason, budgets: nil,
                nbytes: bytes)
        }
        var answer = cache.remainderAnswers ? "evicted tokens go on answering" : "no remainder"
        if !cache.attends && cache.remainderAnswers { answer += ", as plain rows" }
        let sizes = cache.budgets ?? [], spread = Set(sizes).sorted()
        let slots =
            spread.count > 1
            ? "\(spread.first!) to \(spread.last!)" : (spread.first.map(String.init) ?? "unknown")
        return LayerDescription(
            layer: layer, kind: kind, isBounded: true,
            reason: "\(slots) slots a KV head, policy \(type(of: cache.policy).name), \(answer)",
            budgets: cache.budgets, nbytes: cache.nbytes)
    }
}
