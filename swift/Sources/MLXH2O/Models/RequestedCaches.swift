import MLX
import MLXLMCommon

/// What a model's `newCache` gives, which cannot throw on mlx-swift-lm 3.31.4.
extension H2OConfiguration {
    // How many of the first tokens mlx-swift-lm's own windows keep.
    private static let windowsKeep = 4

    /// Bounded caches as `parameters` ask for them; where the model cannot follow the configuration,
    /// the nearest that it can, or its own, and an ``H2ONotice``.
    func requestedCaches(
        for model: any LanguageModel, plain: () throws -> [any KVCache],
        _ trial: () throws -> TrialResult, _ parameters: GenerateParameters?
    ) -> [any KVCache] {
        do {
            if let size = parameters.flatMap({ Self.capacity(reflecting: $0) }) {
                return try ownWindows(plain(), size)
            }
            var wanted = self
            if let size = parameters?.maxKVSize { wanted.budget = .tokens(size) }
            return try wanted.nearestCaches(for: model, plain: plain, trial(), [])
        } catch {
            H2ONotice(
                subject: .budget,
                message: "\(type(of: model)) goes on with its own caches, without a bound. "
                    + error.localizedDescription
            ).log()
            do {
                return try plain().loggingNotices()
            } catch {
                // Not even the model's own: no list is right, and MLX's handler has the error.
                reportToMLX(error)
                return []
            }
        }
    }

    /// Whether positions are to roll that a model's cannot.
    private func mustNotRoll(_ trial: TrialResult) -> Bool {
        guard positions != .absolute, case .failure = trial.rope else { return false }
        return true
    }

    private func nearestCaches(
        for model: any LanguageModel, plain: () throws -> [any KVCache], _ trial: TrialResult,
        _ notices: [H2ONotice]
    ) throws -> [any KVCache] {
        let name = String(describing: type(of: model))
        do {
            return try caches(for: model, plain: plain(), trial: trial, notices)
        } catch let error as H2OError {
            var nearest = self
            let notice: H2ONotice
            switch error {
            case .profile(let message):
                nearest.headBudgets = .uniform
                notice = H2ONotice(
                    subject: .headBudgets,
                    message: "\(message) \(name) goes on with uniform budgets.")
            case .configuration(let message) where mustNotRoll(trial):
                nearest.positions = .absolute
                notice = H2ONotice(
                    subject: .positions,
                    message: "\(message) \(name) goes on with absolute positions.")
            case .configuration(let message) where !packingFits(trial.kinds.compactMap { $0 }):
                (nearest.packing, nearest.frames) = (.dense, .none)
                notice = H2ONotice(
                    subject: .packing, message: "\(message) \(name) goes on with unpacked rows.")
            case .configuration(let message):
                let least = leastTokens(trial)
                guard nearest.budget != .tokens(least) else { throw error }
                nearest.budget = .tokens(least)
                notice = H2ONotice(
                    subject: .budget,
                    message: "\(name) was asked for \(budget) and goes on with \(least) tokens. "
                        + message)
            default: throw error
            }
            return try nearest.nearestCaches(for: model, plain: plain, trial, notices + [notice])
        }
    }

    /// The fewest tokens' worth of memory with which every layer can work.
    private func leastTokens(_ trial: TrialResult) -> Int {
        let kinds = trial.kinds.compactMap { $0 }
        let policy =
            policy
            ?? (kinds.allSatisfy(\.attends) ? H2OPolicies.Salient() : H2OPolicies.Distinct.keysOnly)
        let remembers = remainder || policy.usesEvictedMean
        let most =
            kinds.map { kind in
                var widths = kind.widths
                widths.packing = packing ?? .dense
                return widths.remainderSlots(remembers)
            }.max() ?? 0
        return policy.leastBudget + Self.fewestChoices + most + plainRows(forBudget: .max)
    }

    /// The capacity that generation parameters ask for, where mlx-swift-lm refuses every cache of it but
    /// its own windows: its main branch does, whose parameters have a `kvCache`.
    static func capacity(reflecting parameters: Any) -> Int? {
        let members = Mirror(reflecting: parameters)
        guard members.children.contains(where: { $0.label == "kvCache" }) else { return nil }
        if let size = members.descendant("maxKVSize") as? Int { return size }
        guard let typed = members.descendant("kvCache").flatMap(unwrapped),
            let capacity = Mirror(reflecting: typed).descendant("capacity").flatMap(unwrapped)
        else { return nil }
        return Mirror(reflecting: capacity).descendant("maxTokens") as? Int
    }

    private static func unwrapped(_ value: Any) -> Any? {
        let mirror = Mirror(reflecting: value)
        return mirror.displayStyle == .optional ? mirror.children.first?.value : value
    }

    /// The model's own caches with windows in the place of plain ones, as stock models give them.
    func ownWindows(_ plain: [any KVCache], _ size: Int) throws -> [any KVCache] {
        H2ONotice(
            subject: .request,
            message: "maxKVSize and kvCache.capacity ask for mlx-swift-lm's own windows of \(size) "
                + "tokens, and that is what they get: it takes no other cache with them. Set the "
                + "budget of the H2OConfiguration instead."
        ).log()
        let keep = min(Self.windowsKeep, max(0, size - 1))
        let windows = placedMembers(of: plain).map { _, cache -> any KVCache in
            type(of: cache) == KVCacheSimple.self
                ? RotatingKVCache(maxSize: size, keep: keep) : cache
        }
        return replacingMembers(of: plain, with: windows)
    }
}

/// How a model attends to its caches, found out when the first ones are made.
final class TrialOnce {
    private var known: TrialResult?

    func result(of trial: () throws -> TrialResult) throws -> TrialResult {
        if let known { return known }
        let result = try trial()
        known = result
        return result
    }
}
