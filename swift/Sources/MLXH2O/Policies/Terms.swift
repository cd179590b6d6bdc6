import MLX

/// What ``Policies/Distinct`` and ``Policies/Salient`` are made of: terms `[B, H, N]` that are
/// standardised over the slots that may go, and weighted.
enum Terms {
    // Fewer evicted keys than this give no mean worth measuring distances from; the kept ones serve.
    static let fewestForAMean = 16

    // Below this a key's mean mass per step counts as nothing: it keeps log masses of never-used slots
    // from stretching the scale on which all others are compared.
    private static let massFloor: Float = 1e-6

    /// The mean key `[B, H, D]` of the evicted, or of the kept while too few were evicted.
    static func forgottenMean(_ slots: PolicySlots) -> MLXArray {
        slots.evicted < fewestForAMean ? slots.keys.float32.mean(axis: 2) : slots.evictedMeanKey
    }

    /// Standardised log ||k - mean||^2.
    static func distance(_ slots: PolicySlots, _ mean: MLXArray) -> MLXArray {
        let apart = square(slots.keys.float32 - mean.expandedDimensions(axis: 2)).sum(axis: -1)
        // A key at the mean itself must not stretch the scale for all others.
        let least = Float(1e-6) * square(mean).sum(axis: -1, keepDims: true) + Float(1e-12)
        return standardised(log(maximum(apart, least)), slots)
    }

    /// Standardised log of attention masses `[B, H, N]`.
    static func mass(_ mass: MLXArray, _ slots: PolicySlots) -> MLXArray {
        standardised(log(mass + massFloor), slots)
    }

    /// Standardised log ||v||^2.
    static func valueLength(_ slots: PolicySlots) -> MLXArray {
        standardised(slots.valueLengths.float32, slots)
    }

    /// Standardised log of the ages.
    static func age(_ slots: PolicySlots) -> MLXArray { standardised(log(slots.ages), slots) }

    /// z-scores of x `[B, H, N]` by the mean and deviation among the slots that may go.
    private static func standardised(_ x: MLXArray, _ slots: PolicySlots) -> MLXArray {
        var weight = slots.evictable.asType(.float32)
        weight = weight / maximum(weight.sum(axis: -1, keepDims: true), Float(1))
        let mean = (x * weight).sum(axis: -1, keepDims: true)
        let deviation = sqrt((square(x - mean) * weight).sum(axis: -1, keepDims: true))
        return (x - mean) / (deviation + Float(1e-6))
    }
}
