import MLX

extension Policies {
    /// Keeps the first `sink` tokens and the newest: the oldest other goes first.
    ///
    /// Source: Xiao et al. 2023, arXiv 2309.17453. The yardstick; with the remainder it forgets more
    /// gently. Looks at nothing.
    public struct Streaming: Policy {
        public static let name = "streaming"
        public static let ranksScores = false

        public var options: PolicyOptions

        /// The usual settings.
        public init() {
            options = PolicyOptions()
            options.recent = .count(0)
            options.prompt = .full
        }

        public var needsAttention: Bool { false }

        public func priority(_ slots: PolicySlots) -> MLXArray { slots.positions.asType(.float32) }
    }
}
