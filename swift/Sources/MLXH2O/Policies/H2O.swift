import MLX

extension Policies {
    /// Keeps the tokens that have received the most attention so far: c <- c + mass.
    ///
    /// Source: Zhang et al. 2023, arXiv 2306.14048, section 4 (here with softmax mass per KV head, the
    /// mean over its query heads). Use it to compare with the literature; its memory of single facts is
    /// poor, since a fact receives no attention until it is asked for.
    public struct H2O: Policy {
        public static let name = "h2o"
        public static let sumsMass = true

        public var options = PolicyOptions()

        /// The usual settings.
        public init() {}

        /// Section 5 of the paper: half heavy hitters, half recent, no sinks, sums over all queries.
        public static var paper: H2O {
            H2O().with {
                $0.sink = 0
                $0.prompt = .full
            }
        }
    }
}
