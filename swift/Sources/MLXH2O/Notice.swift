import Foundation

/// What an app should know and no error can carry, once each, on standard error.
final class Notice: @unchecked Sendable {
    static let shared = Notice()

    private let lock = NSLock()
    private var said: [String] = []

    func say(_ message: String) {
        lock.lock()
        let isNew = !said.contains(message)
        if isNew { said.append(message) }
        lock.unlock()
        if isNew { FileHandle.standardError.write(Data("mlx-h2o: \(message)\n".utf8)) }
    }

    /// Everything that was said.
    var messages: [String] {
        lock.lock()
        defer { lock.unlock() }
        return said
    }
}
