import Foundation
import MLXLMCommon

#if canImport(os)
    import os
#endif

/// What an app should know and no error can carry: settings that a model's caches cannot have, or
/// kernels that are not used on this device.
///
/// Read it off the caches (``Swift/Array/notices``), a chat (``H2OChatSession/notices``), or all that
/// there were (``all``). Each is in the system's log too, once (subsystem "mlx-h2o"; standard error on
/// Linux).
public struct H2ONotice: Sendable, Hashable, CustomStringConvertible {
    /// What was asked for.
    public enum Subject: Sendable, CaseIterable {
        case budget, policy, remainder, headBudgets, packing, pins, positions, layer, undo, request,
            kernels,
            spill
    }

    public let subject: Subject
    /// What there is instead, why, and what to do about it.
    public let message: String

    public var description: String { message }

    /// Every notice of this process, in order.
    public static var all: [H2ONotice] { lock.withLock { notices } }

    private static let lock = NSLock()
    nonisolated(unsafe) private static var notices: [H2ONotice] = []

    /// Write it into the system's log, once in a process.
    @discardableResult
    func log() -> H2ONotice {
        let isNew = Self.lock.withLock {
            if Self.notices.contains(self) { return false }
            Self.notices.append(self)
            return true
        }
        guard isNew else { return self }
        #if canImport(os)
            Logger(subsystem: "mlx-h2o", category: "caches").error("\(message, privacy: .public)")
        #else
            FileHandle.standardError.write(Data("mlx-h2o: \(message)\n".utf8))
        #endif
        return self
    }
}

extension [any KVCache] {
    /// What these caches of a model do not have although it was asked for: layers without a bound, and
    /// what ``H2OConfiguration/caches(for:)-(LanguageModel)`` or a registered model did without.
    public var notices: [H2ONotice] {
        var all: [H2ONotice] = []
        for (layer, cache) in placedMembers(of: self) {
            let own = (cache as? H2OKVCache)?.notices ?? .unbounded(layer, cache)
            all += own.filter { !all.contains($0) }
        }
        return all
    }

    /// The same caches; their notices go into the log.
    func loggingNotices() -> [any KVCache] {
        notices.forEach { $0.log() }
        return self
    }
}

extension [H2ONotice] {
    /// That a layer's cache grows with the conversation; nothing for one that has a bound.
    static func unbounded(_ layer: String, _ cache: any KVCache) -> [H2ONotice] {
        guard !isBoundedItself(cache) else { return [] }
        return [
            H2ONotice(
                subject: .layer,
                message: "Layer \(layer) has a \(type(of: cache)), which stays without a bound.")
        ]
    }
}

/// Whether a cache's memory has a bound of its own: a window, chunks, or a state of fixed size.
func isBoundedItself(_ cache: any KVCache) -> Bool {
    // Its chunk size is told by nothing else.
    if let cache = cache as? ChunkedKVCache { return cache.metaState.first != "None" }
    return cache.maxSize != nil || cache is ArraysCache
}
