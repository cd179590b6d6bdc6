import MLX

extension Policies {
    /// Keeps what the last query attended to: c <- mass of the last step only.
    ///
    /// Source: Oren et al. 2024, arXiv 2401.06104. The memoryless end of the scale that ``Policies/H2O`` is the
    /// other end of.
    public struct TOVA: Policy {
        public static let name = "tova"

        public var options: PolicyOptions

        /// The usual settings.
        public init() {
            options = PolicyOptions()
            options.prompt = .full
        }

        public func accumulate(_ scores: MLXArray, seen: PolicyObservation) -> MLXArray {
            seen.perQuery.last!.mass
        }

        public func meanMass(_ scores: MLXArray, ages: MLXArray) -> MLXArray { scores }
    }
}
