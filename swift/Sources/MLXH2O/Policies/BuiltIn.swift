extension H2OPolicies {
    /// Keeps tokens by their mean attention mass per step, with three lesser terms beside it:
    ///
    ///     z(log(c / age)) + distanceWeight z(log ||k - mean evicted key||^2)
    ///         + valueWeight z(log ||v||^2) - ageWeight z(log age)
    ///
    /// each standardised over the slots that may go. The mass per step is what counts on real models;
    /// the other terms are what keeps facts that nothing has asked for yet. Distances are those of
    /// ``Distinct``; lengths are those of the values as they came, whatever they are stored in. Source:
    /// this project (docs/results/experiments.md).
    ///
    /// Masses are per step and values weighed already, so `ageNormalised` and `valueWeighted` are
    /// refused. Prompts are ranked by the same sum, with the mass of the last `window` queries.
    public struct Salient: H2OPolicy {
        public var name: String { "salient" }
        public var usesEvictedMean: Bool { true }
        public var usesValueLengths: Bool { true }

        public var options = H2OPolicyOptions()
        /// Of the distance to what was forgotten.
        public var distanceWeight = 0.3
        /// Of the value's length: what is large moves the output most.
        public var valueWeight = 0.3
        /// Of the age.
        public var ageWeight = 0.3

        /// The usual settings.
        public init() { options.recent = .share(0.25) }

        public static var numbers: [String: WritableKeyPath<Salient, Double>] {
            [
                "distance_weight": \.distanceWeight, "value_weight": \.valueWeight,
                "age_weight": \.ageWeight,
            ]
        }
    }

    /// Keeps tokens that are far from all that was forgotten, used, and young:
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
    public struct Distinct: H2OPolicy {
        public var name: String { "distinct" }
        public var usesEvictedMean: Bool { true }
        public var suitsFrames: Bool { false }

        public var options = H2OPolicyOptions()
        /// Of the mean mass per step.
        public var massWeight = 0.5
        /// Of the age; more makes it a softer window.
        public var ageWeight = 0.6

        /// The usual settings.
        public init() { (options.recent, options.window) = (.share(0.2), 16) }

        /// The form that looks at keys only: without masses the distance does more of the work, and less
        /// age keeps what it finds.
        public static var keysOnly: Distinct {
            var policy = Distinct()
            (policy.massWeight, policy.ageWeight) = (0, 0.25)
            policy.options.recent = .share(0.25)
            return policy
        }

        public static var numbers: [String: WritableKeyPath<Distinct, Double>] {
            ["mass_weight": \.massWeight, "age_weight": \.ageWeight]
        }

        public var needsAttention: Bool { massWeight != 0 }
    }

    /// Keeps the tokens that have received the most attention so far: c <- c + mass.
    ///
    /// Source: Zhang et al. 2023, arXiv 2306.14048, section 4 (here with softmax mass per KV head, the
    /// mean over its query heads). Use it to compare with the literature; its memory of single facts is
    /// poor, since a fact receives no attention until it is asked for.
    public struct H2O: H2OPolicy {
        public var name: String { "h2o" }
        public var options = H2OPolicyOptions()

        /// The usual settings.
        public init() {}

        /// Section 5 of the paper: half heavy hitters, half recent, no sinks, sums over all queries.
        public static var paper: H2O { H2O().with { ($0.sink, $0.prompt) = (0, .full) } }
    }

    /// Keeps what has been attended to lately: c <- decay c + (1 - decay) mass, query by query.
    ///
    /// Source: the exponential form of H2O's sum (arXiv 2306.14048). Use it when topics change within a
    /// conversation.
    public struct EMA: H2OPolicy {
        public var name: String { "ema" }
        public var options = H2OPolicyOptions()
        /// How much of the past stays at each query.
        public var decay = 0.95

        /// The usual settings.
        public init() {}

        public static var numbers: [String: WritableKeyPath<EMA, Double>] { ["decay": \.decay] }
    }

    /// Keeps large |logits|: c <- decay c + (1 - decay) mean over query heads of |s|.
    ///
    /// Source: the AtomGradient report on H2O for MLX; masked entries count 0. Kept for fidelity to it:
    /// a strongly negative logit means *no* attention, and ranking by |logit| loses to every other
    /// policy here. Not for use.
    public struct EMALogits: H2OPolicy {
        public var name: String { "ema-logits" }
        public var options = H2OPolicyOptions()
        /// How much of the past stays at each query.
        public var decay = 0.95

        /// The usual settings.
        public init() {}

        /// The report's: 4 sink, 128 recent and 124 heavy of 256 slots, averages per layer.
        public static var paper: EMALogits {
            EMALogits().with { ($0.recent, $0.unit, $0.prompt) = (.count(128), .layer, .full) }
        }

        public static var numbers: [String: WritableKeyPath<EMALogits, Double>] {
            ["decay": \.decay]
        }
    }

    /// Keeps what the last query attended to: c <- mass of the last step only.
    ///
    /// Source: Oren et al. 2024, arXiv 2401.06104. The memoryless end of the scale that ``H2O`` is the
    /// other end of.
    public struct TOVA: H2OPolicy {
        public var name: String { "tova" }
        public var options = H2OPolicyOptions()

        /// The usual settings.
        public init() { options.prompt = .full }
    }

    /// Keeps the first `sink` tokens and the newest: the oldest other goes first.
    ///
    /// Source: Xiao et al. 2023, arXiv 2309.17453. The yardstick; with the remainder it forgets more
    /// gently. Looks at nothing.
    public struct Streaming: H2OPolicy {
        public var name: String { "streaming" }
        public var options = H2OPolicyOptions()

        /// The usual settings.
        public init() { (options.recent, options.prompt) = (.count(0), .full) }

        public var needsAttention: Bool { false }
    }

    /// Keeps keys unlike the mean direction of the kept keys: 1 - cos(k, mean of k / ||k||).
    ///
    /// Source: Park et al. 2025, arXiv 2504.15364, section 3. Looks at keys only, so it runs where
    /// attention cannot be seen, and remembers facts well; reads all keys at each choice.
    public struct KeyDiff: H2OPolicy {
        public var name: String { "keydiff" }
        public var suitsFrames: Bool { false }
        public var options = H2OPolicyOptions()

        /// The usual settings.
        public init() { options.prompt = .full }

        public var needsAttention: Bool { false }
    }
}
