import MLX

/// What a chunk keeps and which slots are next: the policy's priorities, ranked by ``Selection``.
extension Layer {
    /// The slots of a run that stay within its budget, `[B, heads, budget]` int32, in order of
    /// position.
    func keptSlots(of attended: AttendedSlots) -> MLXArray {
        let places = attended.fields["positions"]!
        // Head by head, so that float32 copies are never of more than one head's rows.
        let priorities = (0 ..< attended.run.heads).map { i in
            let one = attended.head(i)
            return settings.policy.promptPriority(policySlots(one), windowMass: one.windowMass)
                .slicedLast(0 ..< attended.count)
        }
        return Selection.kept(
            priority: joined(priorities, axis: 1), positions: PinnedPositions.unmarked(places),
            evictable: evictable(attended.run, places), count: attended.run.budget,
            unit: settings.policy.options.unit)
    }

    /// The slots of a run that are to be overwritten next, `[B, heads, evictEvery]` int32.
    func nextVictims(of run: Run) -> MLXArray {
        let slots = policySlots(attended(run)), options = settings.policy.options
        return Selection.victims(
            priority: settings.policy.priority(slots).slicedLast(0 ..< run.length),
            positions: slots.positions.slicedLast(0 ..< run.length),
            evictable: slots.evictable.slicedLast(0 ..< run.length), count: options.evictEvery,
            unit: options.unit)
    }

    /// The remainder with the rows of a run but those kept, head by head.
    func folded(_ attended: AttendedSlots, but kept: MLXArray) -> Remainder {
        let dropped = putAlong(
            MLXArray.ones(attended.fields["positions"]!.shape, dtype: .float32), kept,
            values: MLXArray.zeros(kept.shape, dtype: .float32), axis: -1)
        let keys = settings.packing.rows("keys", attended.fields)
        let values = settings.packing.rows("values", attended.fields)
        return (0 ..< attended.run.heads).reduce(remainder) { remainder, i in
            let own = i ..< i + 1, head = attended.run.first + i
            let folded = remainder.heads(head ..< head + 1).fold(
                keys: keys.sliced(own, axis: 1).dense, values: values.sliced(own, axis: 1).dense,
                weights: dropped.sliced(own, axis: 1))
            return remainder.withHeads(head, folded)
        }
    }

    /// The remainder with a row `[B, H, ...]` of every head, as far as its run overwrites a victim.
    func folded(_ old: Fields, _ isVictim: [Bool]) -> Remainder {
        let weights = zip(store.runs, isVictim).flatMap { run, isVictim in
            Array(repeating: Float(isVictim ? 1 : 0), count: run.heads)
        }
        let rows = old.mapValues { $0.expandedDimensions(axis: 2) }
        return remainder.fold(
            keys: settings.packing.rows("keys", rows).dense,
            values: settings.packing.rows("values", rows).dense,
            weights: weights.contains(0) ? MLXArray(weights, [1, weights.count, 1]) : nil)
    }

    /// What each head of a run does in a fused step, with its new token counted.
    ///
    /// - Parameter victim: Which of its victims makes room, or nil.
    func headPlans(_ run: Run, _ victim: Int?) -> [HeadPlan] {
        (0 ..< run.heads).map {
            HeadPlan(
                start: run.start + $0 * run.allocated, length: run.length, victim: victim ?? -1,
                recent: settings.policy.recentSlots(run.budget), evicted: evicted(run),
                choose: run.needsVictims)
        }
    }

    /// A run's slots as policies see them.
    private func policySlots(_ attended: AttendedSlots) -> PolicySlots {
        let whole = positionsAndScores(attended), stored = whole["positions"]!
        let places = PinnedPositions.unmarked(stored)
        let (keys, values) = keysAndValues(attended)
        return PolicySlots(
            keys: keys.dense, values: values.dense, positions: places,
            scores: whole["scores"] ?? MLXArray.zeros(places.shape, dtype: .float32),
            offset: offset, evictable: evictable(attended.run, stored), evicted: attended.evicted,
            evictedMeanKey: remainder.meanKey.sliced(attended.run.range, axis: 1),
            storedLengths: whole["value_lengths"] ?? lengths(of: values), agedFrom: agedFrom)
    }

    /// Lengths of values that are not kept, where the policy ranks by them.
    private func lengths(of values: Rows) -> MLXArray? {
        settings.usesValueLengths ? values.lengths : nil
    }

    /// True where a run may lose the token, by positions as slots store them.
    private func evictable(_ run: Run, _ places: MLXArray) -> MLXArray {
        Selection.evictable(
            positions: places, offset: offset, sink: settings.policy.options.sink,
            recent: settings.policy.recentSlots(budget(of: run)))
    }
}
