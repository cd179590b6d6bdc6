import MLX

extension Policies {
    /// Keeps tokens by their mean attention mass per step, with three lesser terms beside it:
    ///
    ///     z(log(c / age)) + distanceWeight z(log ||k - mean evicted key||^2)
    ///         + valueWeight z(log ||v||^2) - ageWeight z(log age)
    ///
    /// each standardised over the slots that may go. The mass per step is what counts on real models;
    /// the other terms are what keeps facts that nothing has asked for yet. Distances are those of
    /// ``Distinct``; lengths are those of the values as they came, whatever they are stored in. Source:
    /// this project (docs/results/policies.md).
    ///
    /// Masses are per step and values weighed already, so `ageNormalised` and `valueWeighted` are
    /// refused. Prompts are ranked by the same sum, with the mass of the last `window` queries.
    public struct Salient: Policy {
        public static let name = "salient"
        public static let ranksScores = false
        public static let usesEvictedMean = true
        public static let usesValueLengths = true
        public static let sumsMass = true

        public var options: PolicyOptions
        /// Of the distance to what was forgotten.
        public var distanceWeight = 0.3
        /// Of the value's length: what is large moves the output most.
        public var valueWeight = 0.3
        /// Of the age.
        public var ageWeight = 0.3

        /// The usual settings.
        public init() {
            options = PolicyOptions()
            options.recent = .share(0.25)
        }

        public var ownSettings: [String: SettingValue] {
            [
                "distance_weight": .double(distanceWeight), "value_weight": .double(valueWeight),
                "age_weight": .double(ageWeight),
            ]
        }

        public mutating func setOwn(_ name: String, to value: SettingValue) -> Bool {
            guard let weight = value.double else { return false }
            switch name {
            case "distance_weight": distanceWeight = weight
            case "value_weight": valueWeight = weight
            case "age_weight": ageWeight = weight
            default: return false
            }
            return true
        }

        public func validateOwn() throws {
            guard
                [distanceWeight, valueWeight, ageWeight].allSatisfy({
                    abs($0) <= Limits.mostNumber
                })
            else {
                throw H2OError.configuration(
                    "distanceWeight, valueWeight and ageWeight are numbers up to 2^60; got \(distanceWeight), "
                        + "\(valueWeight) and \(ageWeight).")
            }
        }

        public func priority(_ slots: PolicySlots) -> MLXArray {
            salience(slots.scores / slots.ages, slots)
        }

        public func promptPriority(_ slots: PolicySlots, windowMass: MLXArray?) -> MLXArray {
            windowMass.map { salience($0, slots) } ?? priority(slots)
        }

        /// The priority `[B, H, N]` for masses per step `[B, H, N]`.
        private func salience(_ mass: MLXArray, _ slots: PolicySlots) -> MLXArray {
            let distance = Terms.distance(slots, Terms.forgottenMean(slots))
            return Terms.mass(mass, slots) + Float(distanceWeight) * distance
                + Float(valueWeight) * Terms.valueLength(slots)
                - Float(ageWeight) * Terms.age(slots)
        }
    }
}
