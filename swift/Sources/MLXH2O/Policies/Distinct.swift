import MLX

extension Policies {
    /// The default: keeps tokens that are far from all that was forgotten, used, and young:
    ///
    ///     z(log ||k - mean evicted key||^2) + massWeight z(log(c / age)) - ageWeight z(log age)
    ///
    /// each term standardised over the slots that may go; c / age is the mean attention mass per step.
    /// Evicted tokens answer together through the remainder, whose mean key stands for them; a token
    /// near that mean loses little by joining it, and a token far from it (a name, a number) would be
    /// lost. Source: this project. With `massWeight` 0 it looks at keys only and runs in any model.
    ///
    /// Prompts are reduced by the distance to the mean of all keys that may go, plus `massWeight` times
    /// the standardised log mass of the prompt's last `window` queries.
    public struct Distinct: Policy {
        public static let name = "distinct"
        public static let usesEvictedMean = true
        public static let suitsFrames = false
        public static let sumsMass = true

        public var options: PolicyOptions
        /// Of the mean mass per step.
        public var massWeight = 0.5
        /// Of the age; more makes it a softer window.
        public var ageWeight = 0.6

        /// The usual settings.
        public init() {
            options = PolicyOptions()
            options.recent = .share(0.2)
            options.window = 16
        }

        /// The form that looks at keys only: without masses the distance does more of the work, and less
        /// age keeps what it finds.
        public static var keysOnly: Distinct {
            var policy = Distinct()
            policy.massWeight = 0
            policy.ageWeight = 0.25
            policy.options.recent = .share(0.25)
            return policy
        }

        public var ownSettings: [String: SettingValue] {
            ["mass_weight": .double(massWeight), "age_weight": .double(ageWeight)]
        }

        public mutating func setOwn(_ name: String, to value: SettingValue) -> Bool {
            guard let weight = value.double else { return false }
            switch name {
            case "mass_weight": massWeight = weight
            case "age_weight": ageWeight = weight
            default: return false
            }
            return true
        }

        public func validateOwn() throws {
            guard max(abs(massWeight), abs(ageWeight)) <= Limits.mostNumber else {
                throw H2OError.configuration(
                    "massWeight and ageWeight are numbers up to 2^60; got \(massWeight) and \(ageWeight)."
                )
            }
        }

        public var needsAttention: Bool { massWeight != 0 }

        public func priority(_ slots: PolicySlots) -> MLXArray {
            var worth = Terms.distance(slots, Terms.forgottenMean(slots))
            if needsAttention {
                worth = worth + Float(massWeight) * mass(slots.scores / slots.ages, slots)
            }
            return worth - Float(ageWeight) * Terms.age(slots)
        }

        public func promptPriority(_ slots: PolicySlots, windowMass: MLXArray?) -> MLXArray {
            let mayGo = slots.evictable.asType(.float32), evicted = Float(slots.evicted)
            let sum = matmul(mayGo.expandedDimensions(axis: -2), slots.keys.float32).squeezed(
                axis: 2)
            let total = sum + evicted * slots.evictedMeanKey
            let count = mayGo.sum(axis: -1, keepDims: true) + evicted
            var worth = Terms.distance(slots, total / maximum(count, Float(1)))
            if needsAttention {
                let mass = mass(windowMass ?? slots.scores / slots.ages, slots)
                worth = worth + Float(massWeight) * mass
            }
            return worth
        }

        private func mass(_ mass: MLXArray, _ slots: PolicySlots) -> MLXArray {
            Terms.mass(options.valueWeighted ? valueWeighted(mass, slots) : mass, slots)
        }
    }
}
