/// The slots of a layer's KV heads from some length of the conversation on.
struct Stage: Sendable, Equatable {
    /// Tokens that have come when it begins to serve.
    let beyond: Int
    /// Slots of each KV head.
    let budgets: [Int]

    /// Whether it has begun when so many tokens have come.
    func hasBegun(at tokens: Int) -> Bool { beyond < tokens }
}

/// The slots of a layer's KV heads, and those that they have later on.
///
/// A size, in tokens or bytes, is so many slots in all, whichever heads have them. While a conversation has no more
/// tokens than there are slots a head, every head keeps all of it. From then on slots are shared out
/// anew whenever it has doubled, each time as the profile knows conversations of that length, until the
/// shares are those of a long one. Each layer changes by its own offset, so all do so at the same token.
/// Where positions need more bits (``Limits/fewPositions``), there are fewer slots from then on.
struct SlotPlan: Sendable, Equatable {
    /// Slots of each KV head.
    let budgets: [Int]
    /// What follows, in order.
    var later: [Stage] = []

    /// What follows as the engine takes it: of each stage its beginning and its slots.
    var laterNumbers: [Int32] {
        later.flatMap { [Int32(clamping: $0.beyond)] + $0.budgets.map { Int32(clamping: $0) } }
    }

    /// The plan when so many tokens have come.
    func grown(to tokens: Int) -> SlotPlan {
        left(later.drop { $0.hasBegun(at: tokens) }.count)
    }

    /// The plan when only so many stages are to come.
    func left(_ count: Int) -> SlotPlan {
        guard count < later.count else { return self }
        return SlotPlan(
            budgets: later[later.count - count - 1].budgets, later: later.suffix(count))
    }

    /// This plan while positions are narrow, then another that counts wide ones.
    func whileNarrow(then wide: SlotPlan) -> SlotPlan {
        let few = Limits.fewPositions, begun = wide.later.prefix { $0.beyond <= few }
        let then = Stage(beyond: few, budgets: begun.last?.budgets ?? wide.budgets)
        let before = later.filter { $0.beyond < few }
        return SlotPlan(
            budgets: budgets, later: before + [then] + wide.later.dropFirst(begun.count))
    }

    /// A part of the slots at every stage; stages begin as much earlier.
    ///
    /// - Parameters:
    ///   - fraction: How much.
    ///   - fewest: Slots that every head keeps.
    func lowered(to fraction: Double, fewest: Int) -> SlotPlan {
        func part(_ budgets: [Int]) -> [Int] {
            budgets.map { max(fewest, Int(Double($0) * fraction)) }
        }
        var before = 0
        let earlier = later.map { stage in
            before = max(before + 1, Int(Double(stage.beyond) * fraction))
            return Stage(beyond: before, budgets: part(stage.budgets))
        }
        return SlotPlan(budgets: part(budgets), later: earlier)
    }

    /// The plan with no head above what it has in another, stage by stage.
    func capped(by other: SlotPlan) -> SlotPlan {
        func least(_ a: [Int], _ b: [Int]) -> [Int] { zip(a, b).map { min($0, $1) } }
        return SlotPlan(
            budgets: least(budgets, other.budgets),
            later: zip(later, other.later).map {
                Stage(beyond: $0.beyond, budgets: least($0.budgets, $1.budgets))
            })
    }
}

extension H2OProfile {
    /// How slots are shared out as a conversation grows: those of all layers from a number of tokens on.
    ///
    /// The first serve from 0 and are uniform, the last are ``budgets(mean:least:length:)``.
    ///
    /// - Parameters:
    ///   - mean: Slots per KV head on average, the same at every stage.
    ///   - least: Slots that every head must have.
    func stages(mean: Int, least: Int) throws -> [(beyond: Int, budgets: [[Int]])] {
        var stages = [(beyond: 0, budgets: losses.map { $0.map { _ in mean } })]
        var beyond = mean
        // At least once capped, and then for as long as the profile knows better.
        repeat {
            stages.append((beyond, try budgets(mean: mean, least: least, length: 2 * beyond)))
            beyond *= 2
        } while 2 * beyond < grid.last!
        stages.append((beyond, try budgets(mean: mean, least: least)))
        return stages
    }
}

extension H2OConfiguration {
    // Slots per KV head that no conversation fills: later stages would be beyond all positions.
    private static let neverFull = Limits.mostTokens / 64

    /// Whether slots are counted with narrow positions at first: of a size in bytes that a later stage
    /// can hold to, which steps to undo and a model that attends by itself do not allow.
    static func startsNarrow(bytes: Int?, undo: Int, attends: Bool) -> Bool {
        bytes != nil && undo == 0 && attends
    }

    /// Each layer's slots at first, and those that follow as the conversation grows.
    ///
    /// Nothing is evicted while all of a conversation fits. Layers whose rows are of different widths
    /// have different means, and are shared out once, when the first of them is full. Where steps can be
    /// taken back, slots are shared out at once: a change of them cannot be undone.
    ///
    /// - Parameters:
    ///   - sizes: Slots of each layer's heads in a long conversation.
    ///   - means: Of each layer's heads, before a profile shares them out.
    ///   - profile: By which they were shared out, if by any.
    ///   - policy: What chooses.
    func plans(
        of sizes: [[Int]], means: [Int], by profile: H2OProfile?, _ policy: any H2OPolicy
    ) throws -> [SlotPlan] {
        guard let profile, undo == 0, policy.options.unit == .head else {
            return sizes.map { SlotPlan(budgets: $0) }
        }
        if means.min()! >= Self.neverFull {
            return zip(sizes, means).map { slots, mean in SlotPlan(budgets: slots.map { _ in mean })
            }
        }
        if Set(means).count > 1 {
            let full = means.min()!
            return zip(sizes, means).map { slots, mean in
                SlotPlan(
                    budgets: slots.map { _ in mean }, later: [Stage(beyond: full, budgets: slots)])
            }
        }
        let least = leastBesidePins(mean: means[0], policy)
        let stages = try profile.stages(mean: means[0], least: least)
        return sizes.indices.map { layer in
            SlotPlan(
                budgets: stages[0].budgets[layer],
                later: stages.dropFirst().map {
                    Stage(beyond: $0.beyond, budgets: $0.budgets[layer])
                })
        }
    }

    /// The fewest slots of a head by a profile, with those that pins need. A layer makes room for
    /// its pins with its own slots alone, so a layer that deserves few slots would have to refuse
    /// pins that the model as a whole has room for.
    func leastBesidePins(mean: Int, _ policy: any H2OPolicy) -> Int {
        let least = policy.leastBudget + Self.fewestChoices
        guard !pinnedPositions.isEmpty else { return least }
        let pinned = pinnedPositions.reduce(0) { count, span in
            count + max(span.upperBound - max(span.lowerBound, policy.options.sink), 0)
        }
        return max(least, min(policy.leastBudget(pinned: pinned) + Self.fewestChoices, mean))
    }
}
