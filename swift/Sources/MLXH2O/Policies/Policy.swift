import Foundation
import MLX

/// What every policy can be told.
public struct PolicyOptions: Sendable, Equatable {
    /// How many of the last positions a policy protects.
    public enum Recent: Sendable, Equatable {
        /// So many.
        case count(Int)
        /// A share of the head's own budget.
        case share(Double)
    }

    /// What chooses together.
    public enum Unit: String, Sendable {
        /// Each KV head for itself.
        case head
        /// All heads drop the same token.
        case layer
    }

    /// How prompt chunks are scored.
    public enum Prompt: String, Sendable {
        /// By the mass that the last ``PolicyOptions/window`` queries give (SnapKV,
        /// arXiv 2404.14469).
        case window
        /// By what the policy accumulated over all of them.
        case full
    }

    /// The first positions, never evicted (StreamingLLM, arXiv 2309.17453).
    public var sink = 4
    /// The last positions, never evicted.
    public var recent = Recent.share(0.5)
    /// What chooses together.
    public var unit = Unit.head
    /// Victims chosen at once: 1 is the most exact, more spreads the choice's cost.
    public var evictEvery = 1
    /// Divide scores by the steps since the token came.
    public var ageNormalised = false
    /// Multiply scores by ||v|| (VATP, arXiv 2406.12335).
    public var valueWeighted = false
    /// How prompt chunks are scored.
    public var prompt = Prompt.window
    /// Queries in the prompt's window.
    public var window = 64
    /// Width of the average pool along positions that smooths the window's mass; odd.
    public var pool = 5

    /// The usual options.
    public init() {}

    static let names = [
        "sink", "recent", "unit", "evict_every", "age_normalised", "value_weighted", "prompt",
        "window", "pool",
    ]

    var settings: [String: SettingValue] {
        let recentValue: SettingValue =
            switch recent {
            case .count(let count): .int(count)
            case .share(let share): .double(share)
            }
        return [
            "sink": .int(sink), "recent": recentValue, "unit": .string(unit.rawValue),
            "evict_every": .int(evictEvery), "age_normalised": .bool(ageNormalised),
            "value_weighted": .bool(valueWeighted), "prompt": .string(prompt.rawValue),
            "window": .int(window), "pool": .int(pool),
        ]
    }

    /// Change an option by its name in files; false if there is none such.
    mutating func set(_ name: String, to value: SettingValue) -> Bool {
        switch (name, value) {
        case ("sink", .int(let count)): sink = count
        case ("recent", .int(let count)): recent = .count(count)
        case ("recent", .double(let share)): recent = .share(share)
        case ("unit", .string(let text)):
            guard let unit = Unit(rawValue: text) else { return false }
            self.unit = unit
        case ("evict_every", .int(let count)): evictEvery = count
        case ("age_normalised", .bool(let flag)): ageNormalised = flag
        case ("value_weighted", .bool(let flag)): valueWeighted = flag
        case ("prompt", .string(let text)):
            guard let prompt = Prompt(rawValue: text) else { return false }
            self.prompt = prompt
        case ("window", .int(let count)): window = count
        case ("pool", .int(let count)): pool = count
        default: return false
        }
        return true
    }
}

/// What one call of the attention told about N slots.
public final class PolicyObservation {
    /// `[B, Hq, L, N]` float32, minus infinity where masked; nil where a policy only sums masses.
    public let logits: MLXArray?
    /// `[B, Hq, L]` float32, with every column that answered (remainder, attention sinks).
    public let logSumExp: MLXArray?
    /// H, the KV heads of these slots.
    public let heads: Int
    /// How many queries each observed one stands for, per slot `[N]`; nil is 1 each.
    public var standsFor: MLXArray?

    /// Attention that each slot received from the observed queries, `[B, H, N]`.
    public private(set) lazy var mass: MLXArray = Reference.attentionMass(
        logits!, logSumExp: logSumExp!, heads: heads)

    /// What logits tell.
    public init(logits: MLXArray, logSumExp: MLXArray, heads: Int) {
        self.logits = logits
        self.logSumExp = logSumExp
        self.heads = heads
    }

    /// Logits that were never written: only their mass is known.
    init(mass: MLXArray) {
        (logits, logSumExp, heads) = (nil, nil, mass.dim(1))
        self.mass = mass
    }

    /// One observation per query, oldest first.
    public var perQuery: [PolicyObservation] {
        (0 ..< logits!.dim(2)).map {
            PolicyObservation(
                logits: logits!.sliced($0 ..< $0 + 1, axis: 2),
                logSumExp: logSumExp!.sliced($0 ..< $0 + 1, axis: 2), heads: heads)
        }
    }
}

/// The attended slots of H KV heads, as a policy sees them.
public struct PolicySlots {
    /// `[B, H, N, D]`.
    public let keys: MLXArray
    /// `[B, H, N, Dv]`.
    public let values: MLXArray
    /// Logical position of each slot's token, `[B, H, N]` int32.
    public let positions: MLXArray
    /// What the policy has accumulated, `[B, H, N]` float32.
    public let scores: MLXArray
    /// The next logical position.
    public let offset: Int
    /// True where the slot may go, `[B, H, N]`.
    public let evictable: MLXArray
    /// How many tokens each head has lost so far.
    public let evicted: Int
    /// Their mean key `[B, H, D]` float32 (zeros while there are none).
    public let evictedMeanKey: MLXArray
    /// As the store keeps them, or as packed values tell them (``Policy/usesValueLengths``).
    var storedLengths: MLXArray?
    /// The position from which steps count: older tokens are as old as it (``H2OKVCache/newTurn(carry:)``).
    var agedFrom = 0

    /// Steps that each token's score speaks of, its own included: `[B, H, N]` float32, at least 1.
    public var ages: MLXArray {
        (MLXArray(Int32(offset)) - maximum(positions, Int32(agedFrom))).float32
    }

    /// log ||v||^2 of each slot's value as it came, `[B, H, N]`; of packed values the ranges of their
    /// groups stand for it. Of what is stored where the policy does not say that it uses them.
    public var valueLengths: MLXArray { storedLengths ?? MLXH2O.valueLengths(values) }
}

/// A way to choose what to forget; its properties are its hyper-parameters.
///
/// A policy sees slots as arrays `[B, H, N]` and never learns how they are stored. To write your
/// own, conform a struct, override ``priority(_:)`` (and ``accumulate(_:seen:)`` if it needs
/// something other than the summed attention mass), and make it known by ``Policies/register(_:)``.
public protocol Policy: Sendable {
    /// Its name in files and on command lines.
    static var name: String { get }
    /// Whether its priority is made of accumulated scores, which the options can weigh.
    static var ranksScores: Bool { get }
    /// Whether the mean key of the evicted is kept even when the remainder does not answer.
    static var usesEvictedMean: Bool { get }
    /// Whether it ranks by the lengths of values.
    static var usesValueLengths: Bool { get }
    /// Whether packed keys get a frame of themselves; not where distances between keys decide all, since
    /// a frame stretches them.
    static var suitsFrames: Bool { get }
    /// Whether ``accumulate(_:seen:)`` only sums masses, so that no logits need be written for it.
    static var sumsMass: Bool { get }

    /// The policy with its usual settings.
    init()

    /// What every policy can be told.
    var options: PolicyOptions { get set }
    /// Its own hyper-parameters, by their names in files.
    var ownSettings: [String: SettingValue] { get }
    /// Change one of its own hyper-parameters; false if there is none such.
    mutating func setOwn(_ name: String, to value: SettingValue) -> Bool
    /// Throw ``H2OError/configuration(_:)`` unless its own hyper-parameters are in range.
    func validateOwn() throws

    /// Whether it must see attention; a policy that looks at keys only runs in any model.
    var needsAttention: Bool { get }
    /// Scores `[B, H, N]` after an observation; new slots start at 0.
    func accumulate(_ scores: MLXArray, seen: PolicyObservation) -> MLXArray
    /// Each slot's mean mass per step, `[B, H, N]`, as far as its score tells.
    func meanMass(_ scores: MLXArray, ages: MLXArray) -> MLXArray
    /// Scores when a turn begins, of which `carry` of the past counts: of sums of masses the mean per
    /// step over fewer steps, of averages the part that counts.
    func carried(
        _ scores: MLXArray, ages: MLXArray, agesAfter: MLXArray, carry: Double
    ) -> MLXArray
    /// What each slot is worth keeping, `[B, H, N]`; the lowest goes first.
    func priority(_ slots: PolicySlots) -> MLXArray
    /// The same for a prompt chunk. `windowMass` `[B, H, N]` is nil when the prompt is scored in full.
    func promptPriority(_ slots: PolicySlots, windowMass: MLXArray?) -> MLXArray
}

extension Policy {
    public static var ranksScores: Bool { true }
    public static var usesEvictedMean: Bool { false }
    public static var usesValueLengths: Bool { false }
    public static var suitsFrames: Bool { true }
    public static var sumsMass: Bool { false }
    public var ownSettings: [String: SettingValue] { [:] }
    public mutating func setOwn(_ name: String, to value: SettingValue) -> Bool { false }
    public func validateOwn() throws {}
    public var needsAttention: Bool { true }

    public func accumulate(_ scores: MLXArray, seen: PolicyObservation) -> MLXArray {
        scores + (seen.standsFor.map { seen.mass * $0 } ?? seen.mass)
    }

    public func meanMass(_ scores: MLXArray, ages: MLXArray) -> MLXArray { scores / ages }

    public func carried(
        _ scores: MLXArray, ages: MLXArray, agesAfter: MLXArray, carry: Double
    ) -> MLXArray {
        Self.sumsMass ? scores * (agesAfter / ages) : scores * Float(carry)
    }

    public func priority(_ slots: PolicySlots) -> MLXArray { weighted(slots.scores, slots) }

    public func promptPriority(_ slots: PolicySlots, windowMass: MLXArray?) -> MLXArray {
        guard let windowMass else { return priority(slots) }
        let pooled = averagePool(windowMass, positions: slots.positions, width: options.pool)
        return options.valueWeighted ? valueWeighted(pooled, slots) : pooled
    }

    /// Scores with the options `ageNormalised` and `valueWeighted` applied.
    func weighted(_ scores: MLXArray, _ slots: PolicySlots) -> MLXArray {
        let scores = options.ageNormalised ? scores / slots.ages : scores
        return options.valueWeighted ? valueWeighted(scores, slots) : scores
    }

    /// How many of the last positions a head of `budget` slots protects.
    public func recentSlots(_ budget: Int) -> Int {
        switch options.recent {
        case .count(let count): count
        case .share(let share): Int((share * Double(budget)).rounded(.down))
        }
    }

    /// The fewest slots from which a head can always evict.
    public var leastBudget: Int { leastBudget(pinned: 0) }

    /// The same beside so many pinned tokens.
    func leastBudget(pinned: Int) -> Int {
        let needed = options.sink + pinned + options.evictEvery
        // What is left of a budget grows with it. Settings without room in any head are refused.
        return Limits.first(in: 0 ... Limits.mostTokens) { $0 - recentSlots($0) >= needed }
            ?? Limits.mostTokens
    }

    /// Throw ``H2OError/configuration(_:)`` if a head of `budget` slots would have nothing left to
    /// evict.
    public func checkBudget(_ budget: Int) throws {
        try Limits.check("A head's budget", budget, in: 0 ... Limits.mostTokens)
        let recent = recentSlots(budget)
        guard budget >= options.sink + recent + options.evictEvery else {
            throw H2OError.configuration(
                "A budget of \(budget) slots cannot hold \(options.sink) sink and \(recent) recent "
                    + "tokens and \(options.evictEvery) to evict: make it at least \(leastBudget), "
                    + "or lower sink, recent or evictEvery.")
        }
    }

    /// Throw ``H2OError/configuration(_:)`` unless all settings are in range.
    public func validate() throws {
        let name = Self.name
        func fail(_ message: String) -> H2OError {
            .configuration("Policy \"\(name)\": \(message)")
        }
        switch options.recent {
        case .count(let count) where count < 0:
            throw fail("recent is a count of at least 0; got \(count).")
        case .share(let share) where !(share >= 0 && share < 1):
            throw fail("recent is a share of at least 0 and below 1; got \(share).")
        case .count(let count) where count > Limits.mostTokens:
            throw fail("recent is at most \(Limits.mostTokens); got \(count).")
        default: break
        }
        for (field, value, range) in [
            ("sink", options.sink, 0 ... Limits.mostTokens),
            ("evictEvery", options.evictEvery, 1 ... Limits.mostVictims),
            ("window", options.window, 1 ... Limits.mostTokens),
            ("pool", options.pool, 1 ... Limits.widestPool),
        ] {
            try Limits.check("Policy \"\(name)\": \(field)", value, in: range)
        }
        if options.pool.isMultiple(of: 2) { throw fail("pool is odd; got \(options.pool).") }
        let most = Limits.mostTokens
        guard most - recentSlots(most) >= options.sink + options.evictEvery else {
            throw fail(
                "sink, recent and evictEvery need a head of more than \(most) slots: lower one of "
                    + "them.")
        }
        if (options.ageNormalised || options.valueWeighted) && !Self.ranksScores {
            throw fail(
                "it does not rank by scores that ageNormalised or valueWeighted could weigh; leave "
                    + "them off.")
        }
        try validateOwn()
    }

    /// All settings by their names in files.
    public var settings: [String: SettingValue] {
        options.settings.merging(ownSettings) { _, own in own }
    }

    /// The policy with options changed.
    public func with(_ change: (inout PolicyOptions) -> Void) -> Self {
        var policy = self
        change(&policy.options)
        return policy
    }
}

/// Scores times ||v||, `[B, H, N]`.
func valueWeighted(_ scores: MLXArray, _ slots: PolicySlots) -> MLXArray {
    scores * sqrt(square(slots.values.float32).sum(axis: -1))
}

/// Mean over `width` neighbours in order of position, zero-padded (SnapKV, section 4).
///
/// - Parameters:
///   - mass: `[B, H, N]`.
///   - positions: `[B, H, N]`; slots lie in any order.
///   - width: Odd.
func averagePool(_ mass: MLXArray, positions: MLXArray, width: Int) -> MLXArray {
    let order = argSort(positions, axis: -1)
    // From the farthest slot that there is, all others are neighbours.
    let half = min(width / 2, mass.dim(-1))
    let padded = zeroPadded(
        takeAlong(mass, order, axis: -1), axis: mass.ndim - 1, before: half, after: half)
    let pooled = windowSums(padded, width: 2 * half + 1)
    return takeAlong(pooled / Float(width), argSort(order, axis: -1), axis: -1)
}

/// Sums over each `width` neighbours of the last axis, `[..., N]` to `[..., N - width + 1]`.
///
/// Sums over 1, 2, 4, ... neighbours are made of each other, and those in `width` added up: log width
/// additions of arrays, and as many roundings.
private func windowSums(_ x: MLXArray, width: Int) -> MLXArray {
    let kept = x.dim(-1) - width + 1
    var sums = x, total: MLXArray?, done = 0, step = 1
    while step <= width {
        let held = sums.dim(-1)
        if width & step != 0 {
            let part = sums.slicedLast(done ..< done + kept)
            total = total.map { $0 + part } ?? part
            done += step
        }
        if 2 * step <= width {
            sums = sums.slicedLast(0 ..< held - step) + sums.slicedLast(step ..< held)
        }
        step *= 2
    }
    return total!
}
