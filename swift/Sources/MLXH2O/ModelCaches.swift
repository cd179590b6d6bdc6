import MLX
import MLXLMCommon

extension H2OConfiguration {
    // A head that could only choose among one or two tokens would choose nothing.
    static let fewestChoices = 4

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
        let trial = try trial(of: model, with: plainCaches(of: model))
        return try caches(for: model, plain: plainCaches(of: model), trial: trial, [])
    }

    /// The model's own caches, without a bound.
    func plainCaches(of model: any LanguageModel) throws -> [any KVCache] {
        if let model = model as? any H2OModel { return model.plainCaches() }
        return try model.newCache(parameters: nil)
    }

    /// The same, knowing how the model attends to each member of these caches, which are fresh, and
    /// what was done without already.
    func caches(
        for model: any LanguageModel, plain: [any KVCache], trial: TrialResult,
        _ notices: [H2ONotice]
    ) throws -> [any KVCache] {
        let name = String(describing: type(of: model)), kinds = trial.kinds
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
            throw H2OError.partial(
                "\(name) has no plain KV cache to bound: its own caches are all there is.")
        }
        let attends = bounded.allSatisfy(\.attends)
        let policy = policy ?? (attends ? H2OPolicies.Salient() : H2OPolicies.Distinct.keysOnly)
        if !attends && policy.needsAttention {
            throw H2OError.policyNeedsAttention(policy: policy.name, model: name)
        }
        if !attends && packing?.packs == true {
            throw H2OError.configuration(
                "\(name) attends by itself and cannot read packed keys and values.")
        }
        let grouped = try grouped(for: bounded, in: name)
        guard grouped.packing == packing else {
            return try grouped.caches(for: model, plain: plain, trial: trial, notices)
        }
        if !attends && remainder && trial.mayShareMasks {
            // The mask that weighs plain rows fits a bounded cache's rows only.
            guard compatibility == .allowPartial else {
                throw H2OError.partial(
                    "\(name) may give one mask to layers with caches of several kinds, where evicted "
                        + "tokens cannot go on answering: pass remainder: false, or compatibility: "
                        + ".allowPartial to do without them.")
            }
            var forgetful = self
            forgetful.remainder = false
            let notice = H2ONotice(
                subject: .remainder,
                message:
                    "\(name) may give one mask to layers with caches of several kinds: evicted "
                    + "tokens do not go on answering.")
            return try forgetful.caches(for: model, plain: plain, trial: trial, notices + [notice])
        }
        let rope = positions == .absolute ? nil : try trial.rope.get()
        var settings = try settings(of: bounded, in: model, policy, attends, rope).makeIterator()
        let share = PressureShare(pressure, PressureAgreement())
        let notices = try notices + unmet(by: model, bounded, policy, attends)
        var files = try spilledLayers(bounded, of: model, attends)?.makeIterator()
        let bound = try zip(placedMembers(of: plain), kinds).map { member, kind -> any KVCache in
            kind == nil
                ? member.cache
                : try H2OKVCache(settings.next()!, share, notices, file: files?.next() ?? nil)
        }
        return replacingMembers(of: plain, with: bound).loggingNotices()
    }

    /// The same with groups of packed rows that divide the widths of a model's rows.
    private func grouped(for kinds: [LayerKind], in name: String) throws -> H2OConfiguration {
        guard let packing, !packingFits(kinds) else { return self }
        guard let fitting = packing.fitting(kinds.map(\.widths)) else {
            throw H2OError.configuration(
                "groupSize \(packing.groupSize) does not divide the widths of all keys and values of "
                    + "\(name): give one that does, or leave them unpacked.")
        }
        var own = self
        own.packing = fitting
        return own
    }

    /// Whether rows of these widths can be packed as this asks for.
    func packingFits(_ kinds: [LayerKind]) -> Bool {
        packing?.fits(kinds.map(\.widths)) ?? true
    }

    /// What this asks for and a model's caches do without.
    private func unmet(
        by model: any LanguageModel, _ kinds: [LayerKind], _ policy: any H2OPolicy, _ attends: Bool
    ) throws -> [H2ONotice] {
        let name = String(describing: type(of: model))
        var notices = readyToSpill(in: name, attends)
        if self.policy == nil && !attends {
            notices.append(
                H2ONotice(
                    subject: .policy,
                    message:
                        "\(name) attends by itself: policy \"\(policy.name)\" chooses, by keys "
                        + "only, in the place of \"\(H2OPolicies.Salient().name)\", which must see "
                        + "attention."))
        }
        if case .uniform = headBudgets {
        } else if let reason = !attends
            ? "it attends by itself"
            : policy.options.unit == .layer
                ? "policy \"\(policy.name)\" has all heads of a layer keep the same tokens"
                : try profile(of: model, kinds) == nil ? "no profile was made for it" : nil
        {
            notices.append(
                H2ONotice(
                    subject: .headBudgets,
                    message: "The heads of \(name) have uniform budgets: \(reason)."))
        }
        if pins == .instructions {
            notices.append(
                H2ONotice(
                    subject: .pins,
                    message: "The instructions are not pinned: these caches of \(name) were made "
                        + "without them. Use an H2OChatSession or ChatSession(_:h2o:instructions:), or "
                        + "H2OConfiguration.pinning(_:in:)."))
        }
        return notices
    }

    /// What the cache of each bounded layer is to be.
    private func settings(
        of kinds: [LayerKind], in model: any LanguageModel, _ policy: any H2OPolicy,
        _ attends: Bool,
        _ rope: H2ORope?
    ) throws -> [CacheSettings] {
        let unit = policy.options.unit
        let measured = try attends ? profile(of: model, kinds) : nil
        let kinds = attends ? filed(kinds, returningTo: measured?.retrievalHeads) : kinds
        // Bits are chosen by all of the loss over echoes, also where rows return.
        let own = try sized(for: kinds, by: unit == .layer ? nil : measured, policy: policy)
        let rowsReturn = policy.needsAttention && spill != nil
        let profile = rowsReturn ? measured?.whereRowsReturn : measured
        return try own.settings(of: kinds, profile, policy, attends, rope)
    }

    /// The same with a size in tokens or bytes, and a packing.
    func settings(
        of kinds: [LayerKind], _ profile: H2OProfile?, _ policy: any H2OPolicy, _ attends: Bool,
        _ rope: H2ORope?
    ) throws -> [CacheSettings] {
        let packing = packing ?? .dense
        let frames = layerFrames(profile, policy, attends)
        let kinds = kinds.map { $0.stored(packing, isFramed: frames != nil) }
        let budgets = try sharedOut(kinds, by: profile, policy: policy, attends: attends)
        let measured = saturation == nil ? profile?.saturations(of: budgets, policy: policy) : nil
        let usual = [saturation ?? H2ORemainder.saturation]
        let means = try self.means(of: kinds, policy)
        let shares = attends ? profile : nil
        var plans = try plans(of: budgets, means: means, by: shares, policy)
        if case .bytes(let bytes) = budget,
            Self.startsNarrow(bytes: bytes, undo: undo, attends: attends)
        {
            let few = try sharedOut(
                kinds.map(\.narrow), by: profile, policy: policy, attends: attends)
            let fewer = try self.means(of: kinds.map(\.narrow), policy)
            plans = try zip(self.plans(of: few, means: fewer, by: shares, policy), plans).map {
                $0.whileNarrow(then: $1)
            }
        }
        return kinds.indices.map { layer in
            CacheSettings(
                plans[layer].budgets, policy: policy, remainder: remainder,
                attends: attends, packing: packing, undo: undo, frame: frames?[layer],
                saturation: measured?[layer] ?? usual, rope: rope, filling: plans[layer].later,
                pins: pinnedPositions
            )
        }
    }

    /// Each layer's frame, where keys are packed and there are any.
    private func layerFrames(
        _ profile: H2OProfile?, _ policy: any H2OPolicy, _ attends: Bool
    ) -> [H2OFrame]? {
        guard frames == .profile, attends, packing?.keyBits != nil, policy.suitsFrames else {
            return nil
        }
        return profile?.frames(context: context)
    }

    /// Slots per bounded layer and head.
    private func sharedOut(
        _ kinds: [LayerKind], by profile: H2OProfile?, policy: any H2OPolicy, attends: Bool
    ) throws -> [[Int]] {
        let profile = policy.options.unit == .layer ? nil : profile
        let means = try means(of: kinds, policy)
        var sizes = try kinds.indices.map { layer in
            guard let profile else {
                return Array(repeating: means[layer], count: kinds[layer].heads)
            }
            let least = leastBesidePins(mean: means[layer], policy)
            return try profile.budgets(mean: means[layer], least: least)[layer]
        }
        if !attends {
            // One mask serves all layers, so all must hold the same number of tokens.
            let fewest = sizes.flatMap { $0 }.min()!
            sizes = sizes.map { Array(repeating: fewest, count: $0.count) }
        }
        return sizes
    }

    func profile(of model: any LanguageModel, _ kinds: [LayerKind]) throws -> H2OProfile? {
        let candidates: [H2OProfile]
        switch headBudgets {
        case .uniform: return nil
        case .profile(let profile): candidates = [profile]
        case .matching(let profiles): candidates = profiles
        }
        guard let model = model as? any H2OProfiledModel else {
            if case .matching = headBudgets { return nil }
            throw H2OError.profile(
                "A profile needs a model that conforms to H2OProfiledModel; use uniform budgets.")
        }
        let rows = model.embedded(MLXArray([1, 2, 3, 4] as [Int32])).asType(.float32)
        let identity = ModelIdentity(
            modelType: model.modelType, kvHeads: kinds.map(\.heads),
            keyWidths: kinds.map(\.widths.key), vocabularySize: model.vocabularySize,
            probe: rows[0..., 0 ..< min(16, rows.dim(-1))].asArray(Float.self).map(Double.init)
        )
        if case .profile(let profile) = headBudgets { try profile.require(identity) }
        return candidates.first { $0.model.difference(from: identity) == nil }
    }
}
