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
    }

    let score: Score
    let priority: Priority
    /// Whether the heads' mean priority decides for all.
    let perLayer: Bool
    /// Whether scores are divided by the steps since the token came.
    let ageNormalised: Bool
    /// Decay of the averages, 1, and the distance's weights of the mass and of the age.
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
        case is Policies.Streaming: self.init(policy, .none, .age)
        case is Policies.TOVA: self.init(policy, .last, .score)
        default: return nil
        }
    }

    private init(
        _ policy: any Policy, _ score: Score, _ priority: Priority, decay: Double = 0,
        massWeight: Double = 0, ageWeight: Double = 0
    ) {
        (self.score, self.priority) = (score, priority)
        perLayer = policy.options.unit == .layer
        ageNormalised = policy.options.ageNormalised
        weights = [decay, 1, massWeight, -ageWeight].map { Float($0) }
    }
}
