import Foundation

/// Policies and presets by name.
public enum H2OPolicies {
    private static let lists = Registry()

    /// Registered policies, then presets.
    public static var names: [String] {
        lists.read { $0.policies.map(\.name) + $0.presets.map(\.name) }
    }

    /// Make a policy available by its name, in saved caches too.
    public static func register(_ policy: any H2OPolicy) {
        lists.change { lists in
            lists.policies.removeAll { $0.name == policy.name }
            lists.policies.append(policy)
        }
    }

    /// A policy or preset by name, with settings changed.
    ///
    /// - Parameters:
    ///   - name: A registered name, or a preset's.
    ///   - settings: Fields to change, by their names in files (`sink`, `recent`, `evict_every` ...).
    /// - Throws: ``H2OError/configuration(_:)``: the name or a setting is unknown, or out of range.
    public static func make(
        _ name: String, settings: [String: H2OSettingValue] = [:]
    ) throws -> any H2OPolicy {
        let entry: (any H2OPolicy)? = lists.read { lists in
            lists.presets.first { $0.name == name }?.policy
                ?? lists.policies.first { $0.name == name }
        }
        guard var policy = entry else {
            throw H2OError.configuration(
                "Unknown policy \"\(name)\"; choose from \(names.joined(separator: ", ")).")
        }
        for (key, value) in settings.sorted(by: { $0.key < $1.key }) {
            guard policy.set(key, to: value) else {
                throw H2OError.configuration(
                    "Policy \"\(name)\" has no setting \(key) that could be \(value.text); it has "
                        + policy.settings.keys.sorted().joined(separator: ", ") + ".")
            }
        }
        try policy.validate()
        return policy
    }

    private struct Lists: Sendable {
        var policies: [any H2OPolicy] = [
            Distinct(), EMA(), EMALogits(), H2O(), KeyDiff(), Salient(), Streaming(), TOVA(),
        ]
        let presets: [(name: String, policy: any H2OPolicy)] = [
            ("paper", EMALogits.paper), ("h2o-paper", H2O.paper),
        ]
    }

    private final class Registry: @unchecked Sendable {
        private var lists = Lists()
        private let lock = NSLock()

        func read<Result>(_ body: (Lists) -> Result) -> Result {
            lock.lock()
            defer { lock.unlock() }
            return body(lists)
        }

        func change(_ body: (inout Lists) -> Void) {
            lock.lock()
            defer { lock.unlock() }
            body(&lists)
        }
    }
}
