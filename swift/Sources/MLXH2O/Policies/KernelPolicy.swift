/// A policy in the kernels' terms. Policies that have none are left to their own methods, which define
/// what is right.
struct KernelPolicy {
    /// What is accumulated, as in metal/priority.h.
    enum Score: Int {
        case none, sum, ema, emaLogits, last
    }

    /// What is ranked, as in metal/priority.h.
    enum Priority: Int {
        case score, age
        /// As ``Policies/Distinct`` does.
        case distance
        /// As ``Policies/KeyDiff`` does.
        case direction
        /// As ``Policies/Salient`` does.
        case salience

        /// Whether the keys' distances from the mean evicted key are part of it.
        var needsDistances: Bool { self == .distance || self == .salience }
    }

    let score: Score
    let priority: Priority
    /// Whether the heads' mean priority decides for all.
    let perLayer: Bool
    /// Whether scores are divided by the steps since the token came.
    let ageNormalised: Bool
    /// Decay of the averages; of the terms of distance and salience: distance, mass, value, age.
    let weights: [Float]

    /// nil for a policy that the kernels do not know.
    init?(_ policy: any Policy) {
        switch policy {
        case let policy as Policies.Distinct:
            self.init(
                policy, policy.needsAttention ? .sum : .none, .distance,
                massWeight: policy.massWeight, ageWeight: policy.ageWeight)
        case let policy as Policies.EMA: self.init(policy, .ema, .score, decay: policy.decay)
        case let policy as Policies.EMALogits:
            self.init(policy, .emaLogits, .score, decay: policy.decay)
        case is Policies.H2O: self.init(policy, .sum, .score)
        case is Policies.KeyDiff: self.init(policy, .none, .direction)
        case let policy as Policies.Salient:
            self.init(
                policy, .sum, .salience, distanceWeight: policy.distanceWeight, massWeight: 1,
                valueWeight: policy.valueWeight, ageWeight: policy.ageWeight)
        case is Policies.Streaming: self.init(policy, .none, .age)
        case is Policies.TOVA: self.init(policy, .last, .score)
        default: return nil
        }
    }

    private init(
        _ policy: any Policy, _ score: Score, _ priority: Priority, decay: Double = 0,
        distanceWeight: Double = 1, massWeight: Double = 0, valueWeight: Double = 0,
        ageWeight: Double = 0
    ) {
        (self.score, self.priority) = (score, priority)
        perLayer = policy.options.unit == .layer
        ageNormalised = policy.options.ageNormalised
        weights = [decay, distanceWeight, massWeight, valueWeight, -ageWeight].map { Float($0) }
    }
}
