import Foundation

#if canImport(os)
    import os
#endif

/// What an app should know and no error can carry, once each: in the system's log (subsystem "mlx-h2o"),
/// on standard error where there is none.
final class Notice: @unchecked Sendable {
    static let shared = Notice()

    private let lock = NSLock()
    private var said: [String] = []
    #if canImport(os)
        private let log = Logger(subsystem: "mlx-h2o", category: "caches")
    #endif

    func say(_ message: String) {
        lock.lock()
        let isNew = !said.contains(message)
        if isNew { said.append(message) }
        lock.unlock()
        guard isNew else { return }
        #if canImport(os)
            log.error("\(message, privacy: .public)")
        #else
            FileHandle.standardError.write(Data("mlx-h2o: \(message)\n".utf8))
        #endif
    }

    /// Everything that was said.
    var messages: [String] {
        lock.lock()
        defer { lock.unlock() }
        return said
    }
}
