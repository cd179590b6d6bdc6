import MLX
import MLXLMCommon

/// How a model's caches are to be bounded: a value, checked when it is made.
public struct H2OConfiguration: Sendable {
    /// How much memory.
    public enum Budget: Sendable, Equatable {
        /// Tokens' worth of memory per KV head and layer, on average; the remainder of the evicted
        /// is charged against it.
        case tokens(Int)
        /// Bytes for all bounded layers together and one sequence, everything counted.
        case bytes(Int)
        /// The same as a part of what a 16-bit cache takes at ``H2OConfiguration/context``.
        case share(Double)
    }

    /// How slots are shared out among heads.
    public enum HeadBudgets: Sendable {
        /// All the same.
        case uniform
        /// By this profile; a model that it was not made for is an error.
        case profile(H2OProfile)
        /// By the first of these that was made for the model, else all the same.
        case matching([H2OProfile])
    }

    /// In which frames packed keys are stored.
    public enum Frames: Sendable {
        /// Those that the model's profile has for conversations of ``H2OConfiguration/context`` tokens,
        /// where keys are packed, the policy does not rank them by direction, and it has any.
        case profile
        /// None.
        case none
    }

    /// Tokens of the conversation that are never evicted.
    public enum Pins: Sendable, Equatable {
        /// None but those that ``H2OKVCache/pin(_:)`` names.
        case none
        /// What the model is told first: the instructions of an ``H2OChatSession``, or of a `ChatSession`
        /// that is made with this configuration.
        case instructions
        /// At these positions, whatever comes there.
        case positions([Range<Int>])
    }

    /// What to do about layers that cannot be bounded.
    public enum Compatibility: Sendable {
        /// Every layer must be bounded, by this library or by itself, else it is an error.
        case requireAllLayers
        /// Bound what can be bounded and leave other layers as they are.
        case allowPartial
    }

    /// How much memory.
    public var budget: Budget
    /// What chooses; nil is ``H2OPolicies/Salient``, or ``H2OPolicies/Distinct`` in its form that looks at keys
    /// only where a model attends by itself.
    public var policy: (any H2OPolicy)?
    /// Whether evicted tokens go on answering.
    public var remainder: Bool
    /// How slots are shared out among heads; in stock models always uniformly.
    public var headBudgets: HeadBudgets
    /// How keys and values are stored; nil: with a size in bytes, or a share, as loses least by the
    /// model's profile (but for what is negligible: more slots are worth that), or keys as they come and
    /// values in 6 bits where keys have no frame; with a size in tokens as they come.
    public var packing: H2OPacking?
    /// In which frames packed keys are stored.
    public var frames: Frames
    /// Tokens that conversations may reach.
    public var context: Int
    /// Where the second-order term of every head's remainder saturates, 0 for none; nil is as the profile
    /// says for each, where it was made with this policy.
    public var saturation: Float?
    /// How many of the last steps can be taken back after evictions (``H2OKVCache/trim(_:)``).
    public var undo: Int
    /// Tokens that are never evicted, counted against the budget.
    public var pins: Pins
    /// At which positions queries see the kept keys.
    public var positions: Positions
    /// A file behind the memory, from which evicted rows come back; nil: none. It needs a model that attends
    /// through this library.
    public var spill: H2OSpill?
    /// What to do about layers that cannot be bounded.
    public var compatibility: Compatibility
    /// What may ask for less memory while caches are in use.
    public var pressure: H2OMemoryPressure?

    /// - Throws: ``H2OError/configuration(_:)`` for settings out of range.
    public init(
        budget: Budget, policy: (any H2OPolicy)? = nil, remainder: Bool = true,
        headBudgets: HeadBudgets = .uniform, packing: H2OPacking? = nil,
        frames: Frames = .profile, context: Int = usualContext, saturation: Float? = nil,
        undo: Int = 0, pins: Pins = .none, positions: Positions = .absolute, spill: H2OSpill? = nil,
        compatibility: Compatibility = .requireAllLayers, pressure: H2OMemoryPressure? = nil
    ) throws {
        (self.budget, self.policy, self.remainder) = (budget, policy, remainder)
        (self.headBudgets, self.packing, self.undo) = (headBudgets, packing, undo)
        (self.frames, self.context, self.saturation) = (frames, context, saturation)
        (self.pins, self.positions, self.spill) = (pins, positions, spill)
        (self.compatibility, self.pressure) = (compatibility, pressure)
        try validate()
    }

    /// Throw ``H2OError/configuration(_:)`` for settings out of range, after changing some.
    public func validate() throws {
        let policy = policy ?? H2OPolicies.Salient()
        try policy.validate()
        // What every cache is to have, tried with one head that has slots enough.
        _ = try CacheSettings(
            [Limits.mostTokens], policy: policy, remainder: remainder, attends: true,
            packing: .dense, undo: undo, saturation: [saturation ?? H2ORemainder.saturation],
            pins: pinnedPositions
        ).engine()
        try checkRolling()
        try Limits.check("context", context, in: 1 ... Limits.mostTokens)
        try spill?.validate()
        switch budget {
        case .tokens(let count): try policy.checkBudget(count)
        case .bytes(let count): try policy.checkBytes(count)
        case .share(let part):
            guard part > 0 && part <= Limits.largestShare else {
                throw H2OError.configuration(
                    "A share is a part of a 16-bit cache, such as 0.25; got \(part).")
            }
        }
    }

    private func checkRolling() throws {
        guard positions != .absolute else { return }
        guard !remainder else {
            throw H2OError.configuration(
                "positions: .rolling leaves evicted tokens no position, so there is no remainder: pass "
                    + "remainder: false.")
        }
        guard packing?.packs != true else {
            throw H2OError.configuration(
                "positions: .rolling turns keys at every step, but not packed keys: leave packing "
                    + "out.")
        }
    }

    /// Spans of positions, as far as they are known.
    var pinnedPositions: [Range<Int>] {
        if case .positions(let spans) = pins { spans } else { [] }
    }

    /// What the longest conversations are taken to have.
    public static let usualContext = 2048

    /// ``H2OPolicies/Salient`` and the remainder in 1024 tokens: the best of what is known here.
    public static let `default` = try! H2OConfiguration(budget: .tokens(1024))

    /// The AtomGradient report: 4 sink, 128 recent and 124 heavy of 256 tokens, no remainder.
    public static let paper = try! H2OConfiguration(
        budget: .tokens(256), policy: H2OPolicies.EMALogits.paper, remainder: false)

    /// Zhang et al. 2023: half heavy hitters, half recent, in 1024 tokens, no remainder.
    public static let h2o = try! H2OConfiguration(
        budget: .tokens(1024), policy: H2OPolicies.H2O.paper, remainder: false)

    /// StreamingLLM: 4 sinks and a window of 1024 tokens; the remainder answers for the rest. Runs in
    /// every model.
    public static let streaming = try! H2OConfiguration(
        budget: .tokens(1024), policy: H2OPolicies.Streaming())

    /// The configuration with another budget.
    ///
    /// - Throws: ``H2OError/configuration(_:)`` for one without room to evict.
    public func with(budget: Budget) throws -> H2OConfiguration {
        var changed = self
        changed.budget = budget
        try changed.validate()
        return changed
    }
}
