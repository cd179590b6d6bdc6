import MLX
import MLXLMCommon

extension H2OConfiguration {
    // A head of a profile that could only choose among one or two tokens would choose nothing.
    private static let fewestChoices = 4

    /// The model's own caches, with every plain KV cache replaced by a bounded one, members of a
    /// `CacheList` too.
    ///
    /// Runs the model for one token to see how it attends. Sliding-window, state-space and other
    /// caches stay as the model made them.
    ///
    /// - Parameter model: Any model of mlx-swift-lm, or your own.
    /// - Throws: ``H2OError``: a policy that this model cannot run, a budget without room to evict, a
    ///   profile of another model, or a layer that cannot be bounded.
    public func caches(for model: any LanguageModel) throws -> [any KVCache] {
        let kinds = try layerKinds(of: model, trying: plainCaches(of: model))
        return try caches(for: model, plain: plainCaches(of: model), kinds: kinds)
    }

    /// The model's own caches, without a bound.
    func plainCaches(of model: any LanguageModel) throws -> [any KVCache] {
        if let model = model as? any H2OModel { return model.plainCaches() }
        return try model.newCache(parameters: nil)
    }

    /// The same, knowing how the model attends to each member of these caches, which are fresh.
    func caches(
        for model: any LanguageModel, plain: [any KVCache], kinds: [LayerKind?]
    ) throws -> [any KVCache] {
        let name = String(describing: type(of: model))
        if compatibility == .requireAllLayers {
            for ((layer, cache), kind) in zip(placedMembers(of: plain), kinds)
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
        let bound = try zip(placedMembers(of: plain), kinds).map { member, kind -> any KVCache in
            guard kind != nil else { return member.cache }
            return try H2OKVCache(
                .heads(budgets.next()!), policy: policy, remainder: remainder, attends: attends,
                packing: packing, pressure: pressure)
        }
        return replacingMembers(of: plain, with: bound)
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

    /// How the model attends to each of its plain caches, members of a `CacheList` too; nil for
    /// other caches. A step is taken with the caches given, which are of no use afterwards.
    func layerKinds(of model: any LanguageModel, trying plain: [any KVCache]) throws -> [LayerKind?]
    {
        let members = placedMembers(of: plain).map(\.cache)
        let trials = members.map { type(of: $0) == KVCacheSimple.self ? TrialCache() : nil }
        let tried = trials.compactMap { $0 }
        guard !tried.isEmpty else { return members.map { _ in nil } }
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
        if stock && !tried.contains(where: \.isAskedForMasks) {
            throw H2OError.partial(
                "\(name) makes its masks without asking its caches, which a bounded cache cannot "
                    + "serve.")
        }
        return trials.map { $0?.kind }
    }

    /// Whether a cache's memory has a bound of its own: a window, chunks, or a state of fixed size.
    private func isBoundedItself(_ cache: any KVCache) -> Bool {
        // Its chunk size is told by nothing else.
        if let cache = cache as? ChunkedKVCache { return cache.metaState.first != "None" }
        return cache.maxSize != nil || cache is ArraysCache
    }
}
