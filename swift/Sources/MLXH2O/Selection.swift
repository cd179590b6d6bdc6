import MLX

/// Which slots go: the lowest priority first among the unprotected, ties to the oldest position.
///
/// The tie rule makes every backend choose alike.
enum Selection {
    /// True where a slot is neither a sink nor recent, `[B, H, N]`.
    static func evictable(
        positions: MLXArray, offset: Int, sink: Int, recent: Int
    ) -> MLXArray {
        (positions .>= Int32(sink)) .&& (positions .< Int32(offset - recent))
    }

    /// The `count` slots to free, worst first.
    ///
    /// - Parameters:
    ///   - priority: `[B, H, N]`; the lowest goes first.
    ///   - positions: `[B, H, N]` int32, all different within a head.
    ///   - evictable: `[B, H, N]`; at least `count` true in each head.
    ///   - count: Victims per head.
    ///   - unit: With `.layer` the heads' mean priority decides for all.
    /// - Returns: Slot indices `[B, H, count]` int32.
    static func victims(
        priority: MLXArray, positions: MLXArray, evictable: MLXArray, count: Int,
        unit: PolicyOptions.Unit
    ) -> MLXArray {
        let ranked = rankable(priority, evictable, unit)
        if count == 1 {
            let lowest = ranked.min(axis: -1, keepDims: true)
            let tied = which((ranked .== lowest) .&& evictable, positions, Int32.max)
            return argMin(tied, axis: -1, keepDims: true).asType(.int32)
        }
        return orderByWorth(ranked, positions).slicedLast(0 ..< count).asType(.int32)
    }

    /// The `count` slots to keep of a prompt chunk, in order of position.
    ///
    /// Protected slots are always among them; parameters as in ``victims``.
    static func kept(
        priority: MLXArray, positions: MLXArray, evictable: MLXArray, count: Int,
        unit: PolicyOptions.Unit
    ) -> MLXArray {
        let order = orderByWorth(rankable(priority, evictable, unit), positions)
        let kept = order.slicedLast(order.dim(-1) - count ..< order.dim(-1))
        let byPosition = argSort(takeAlong(positions, kept, axis: -1), axis: -1)
        return takeAlong(kept, byPosition, axis: -1).asType(.int32)
    }

    /// Priorities with plus infinity for the protected; a NaN counts as the lowest.
    private static func rankable(
        _ priority: MLXArray, _ evictable: MLXArray, _ unit: PolicyOptions.Unit
    ) -> MLXArray {
        var priority = priority
        if unit == .layer {
            priority = broadcast(priority.mean(axis: 1, keepDims: true), to: priority.shape)
        }
        priority = which(isNaN(priority), -Float.infinity, priority)
        // Finite, so that a protected slot never ties with an unprotected one.
        let finite = minimum(priority, Float.greatestFiniteMagnitude)
        return which(evictable, finite, Float.infinity)
    }

    /// Slot indices from the first to go to the last, ties oldest first, `[B, H, N]`.
    private static func orderByWorth(_ ranked: MLXArray, _ positions: MLXArray) -> MLXArray {
        let byPosition = argSort(positions, axis: -1)
        // argSort is stable, so equal priorities stay in order of position.
        let byWorth = argSort(takeAlong(ranked, byPosition, axis: -1), axis: -1)
        return takeAlong(byPosition, byWorth, axis: -1)
    }
}
