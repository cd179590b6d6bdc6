import Foundation
import MLX

/// What every policy can be told.
public struct H2OPolicyOptions: Sendable, Equatable {
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
        /// By the mass that the last ``H2OPolicyOptions/window`` queries give (SnapKV,
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

    var settings: [String: H2OSettingValue] {
        let recentValue: H2OSettingValue =
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
    mutating func set(_ name: String, to value: H2OSettingValue) -> Bool {
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

/// A way to choose what to forget: a value, whose properties are its hyper-parameters.
///
/// Those of ``H2OPolicies`` run in the engine; ``H2OPolicies/Own`` is a policy of the app's own.
public protocol H2OPolicy: Sendable {
    /// Its name in files and on command lines.
    var name: String { get }
    /// Whether the mean key of the evicted is kept even when the remainder does not answer.
    var usesEvictedMean: Bool { get }
    /// Whether it ranks by the lengths of values.
    var usesValueLengths: Bool { get }
    /// Whether packed keys get a frame of themselves; not where distances between keys decide all, since
    /// a frame stretches them.
    var suitsFrames: Bool { get }
    /// What every policy can be told.
    var options: H2OPolicyOptions { get set }
    /// Its own hyper-parameters, by their names in files.
    static var numbers: [String: WritableKeyPath<Self, Double>] { get }
    /// Whether it must see attention; a policy that looks at keys only runs in any model.
    var needsAttention: Bool { get }
}

extension H2OPolicy {
    public var usesEvictedMean: Bool { false }
    public var usesValueLengths: Bool { false }
    public var suitsFrames: Bool { true }
    public static var numbers: [String: WritableKeyPath<Self, Double>] { [:] }
    public var needsAttention: Bool { true }

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
        try validate()
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
        _ = try EnginePolicy(self)
        let most = Limits.mostTokens
        guard most - recentSlots(most) >= options.sink + options.evictEvery else {
            throw H2OError.configuration(
                "Policy \"\(name)\": sink, recent and evictEvery need a head of more than \(most) "
                    + "slots: lower one of them.")
        }
    }

    /// All settings by their names in files.
    public var settings: [String: H2OSettingValue] {
        options.settings.merging(Self.numbers.mapValues { .double(self[keyPath: $0]) }) { $1 }
    }

    /// Change a setting by its name in files; false if there is none such.
    mutating func set(_ name: String, to value: H2OSettingValue) -> Bool {
        if options.set(name, to: value) { return true }
        guard let place = Self.numbers[name], let number = value.double else { return false }
        self[keyPath: place] = number
        return true
    }

    /// The policy with options changed.
    public func with(_ change: (inout H2OPolicyOptions) -> Void) -> Self {
        var policy = self
        change(&policy.options)
        return policy
    }

    /// Whether lengths of values are kept beside rows that are stored so.
    func keepsValueLengths(in packing: H2OPacking) -> Bool {
        usesValueLengths && packing.valueBits == nil
    }
}
