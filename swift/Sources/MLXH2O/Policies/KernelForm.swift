/// A policy as the fused kernels know it.
struct KernelForm {
    /// What is accumulated, as in metal/priority.h.
    enum Score: Int {
        case none, sum, ema, emaLogits, last
    }

    /// What is ranked, as in metal/priority.h.
    enum Priority: Int {
        case score, age
        /// As ``Distinct`` does.
        case distance
        /// As ``KeyDiff`` does.
        case direction
    }

    let score: Score
    let priority: Priority
    /// Of the averages.
    var decay = 0.0
    /// Of ``Distinct``.
    var massWeight = 0.0
    /// Likewise.
    var ageWeight = 0.0
}

/// A policy that the fused kernels can run; any other is left to its own methods, which define what
/// is right.
protocol KernelPolicy: Policy {
    var kernelForm: KernelForm { get }
}

extension Distinct: KernelPolicy {
    var kernelForm: KernelForm {
        KernelForm(
            score: needsAttention ? .sum : .none, priority: .distance, massWeight: massWeight,
            ageWeight: ageWeight)
    }
}

extension EMA: KernelPolicy {
    var kernelForm: KernelForm { KernelForm(score: .ema, priority: .score, decay: decay) }
}

extension EMALogits: KernelPolicy {
    var kernelForm: KernelForm { KernelForm(score: .emaLogits, priority: .score, decay: decay) }
}

extension H2O: KernelPolicy {
    var kernelForm: KernelForm { KernelForm(score: .sum, priority: .score) }
}

extension KeyDiff: KernelPolicy {
    var kernelForm: KernelForm { KernelForm(score: .none, priority: .direction) }
}

extension Streaming: KernelPolicy {
    var kernelForm: KernelForm { KernelForm(score: .none, priority: .age) }
}

extension TOVA: KernelPolicy {
    var kernelForm: KernelForm { KernelForm(score: .last, priority: .score) }
}
