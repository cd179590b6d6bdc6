import MLX

extension Policies {
    /// Keeps what has been attended to lately: c <- decay c + (1 - decay) mass, query by query.
    ///
    /// Source: the exponential form of H2O's sum (arXiv 2306.14048). Use it when topics change within a
    /// conversation.
    public struct EMA: Policy {
        public static let name = "ema"

        public var options = PolicyOptions()
        /// How much of the past stays at each query.
        public var decay = 0.95

        /// The usual settings.
        public init() {}

        public var ownSettings: [String: SettingValue] { ["decay": .double(decay)] }

        public mutating func setOwn(_ name: String, to value: SettingValue) -> Bool {
            setDecay(&decay, name, value)
        }

        public func validateOwn() throws { try checkDecay(decay) }

        public func accumulate(_ scores: MLXArray, seen: PolicyObservation) -> MLXArray {
            averaged(scores, seen, decay: decay) { $0.mass }
        }

        public func meanMass(_ scores: MLXArray, ages: MLXArray) -> MLXArray { scores }
    }

    /// Keeps large |logits|: c <- decay c + (1 - decay) mean over query heads of |s|.
    ///
    /// Source: the AtomGradient report on H2O for MLX; masked entries count 0. Kept for fidelity to it:
    /// a strongly negative logit means *no* attention, and ranking by |logit| loses to every other
    /// policy here. Not for use.
    public struct EMALogits: Policy {
        public static let name = "ema-logits"

        public var options = PolicyOptions()
        /// How much of the past stays at each query.
        public var decay = 0.95

        /// The usual settings.
        public init() {}

        /// The report's: 4 sink, 128 recent and 124 heavy of 256 slots, averages per layer.
        public static var paper: EMALogits {
            EMALogits().with {
                $0.recent = .count(128)
                $0.unit = .layer
                $0.prompt = .full
            }
        }

        public var ownSettings: [String: SettingValue] { ["decay": .double(decay)] }

        public mutating func setOwn(_ name: String, to value: SettingValue) -> Bool {
            setDecay(&decay, name, value)
        }

        public func validateOwn() throws { try checkDecay(decay) }

        public func accumulate(_ scores: MLXArray, seen: PolicyObservation) -> MLXArray {
            averaged(scores, seen, decay: decay) { query in
                let logits = query.logits!, heads = query.heads
                let (B, Hq, L, N) = (logits.dim(0), logits.dim(1), logits.dim(2), logits.dim(3))
                let size = which(logits .== -Float.infinity, Float(0), abs(logits))
                return size.reshaped([B, heads, Hq / heads * L, N]).sum(axis: 2)
                    * Float(Double(heads) / Double(Hq))
            }
        }

        public func meanMass(_ scores: MLXArray, ages: MLXArray) -> MLXArray { scores }
    }
}

private func averaged(
    _ scores: MLXArray, _ seen: PolicyObservation, decay: Double,
    evidence: (PolicyObservation) -> MLXArray
) -> MLXArray {
    seen.perQuery.reduce(scores) { Float(decay) * $0 + Float(1 - decay) * evidence($1) }
}

private func setDecay(_ decay: inout Double, _ name: String, _ value: SettingValue) -> Bool {
    guard name == "decay", let number = value.double else { return false }
    decay = number
    return true
}

private func checkDecay(_ decay: Double) throws {
    guard decay >= 0 && decay < 1 else {
        throw H2OError.configuration("decay must be at least 0 and below 1; got \(decay).")
    }
}
