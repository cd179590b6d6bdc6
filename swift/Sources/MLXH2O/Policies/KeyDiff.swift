import MLX

extension Policies {
    /// Keeps keys unlike the mean direction of the kept keys: 1 - cos(k, mean of k / ||k||).
    ///
    /// Source: Park et al. 2025, arXiv 2504.15364, section 3. Looks at keys only, so it runs where
    /// attention cannot be seen, and remembers facts well; reads all keys at each choice.
    public struct KeyDiff: Policy {
        public static let name = "keydiff"
        public static let ranksScores = false
        public static let suitsFrames = false

        public var options: PolicyOptions

        /// The usual settings.
        public init() {
            options = PolicyOptions()
            options.prompt = .full
        }

        public var needsAttention: Bool { false }

        public func priority(_ slots: PolicySlots) -> MLXArray {
            let directions = unit(slots.keys.float32)
            let anchor = unit(directions.mean(axis: 2))
            return 1 - matmul(directions, anchor.column).squeezed(axis: -1)
        }

        private func unit(_ x: MLXArray) -> MLXArray {
            x * rsqrt(square(x).sum(axis: -1, keepDims: true) + Float(1e-12))
        }
    }
}
