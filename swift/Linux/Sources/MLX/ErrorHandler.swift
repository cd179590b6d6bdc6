import Cmlx
import Foundation

/// Runs the body, then throws the first error that MLX reported in it.
public func withError<R>(_ body: (ErrorBox) throws -> R) throws -> R {
    let box = ErrorBox()
    return try withErrorHandler({ box.firstError = MLXError.caught($0) }) {
        let value = try body(box)
        try box.check()
        return value
    }
}

public func withError<R>(_ body: () throws -> R) throws -> R { try withError { _ in try body() } }

public func withError<R>(_ body: (ErrorBox) async throws -> R) async throws -> R {
    let box = ErrorBox()
    return try await withErrorHandler({ box.firstError = MLXError.caught($0) }) {
        let value = try await body(box)
        try box.check()
        return value
    }
}

public func withError<R>(_ body: () async throws -> R) async throws -> R {
    try await withError { _ in try await body() }
}

/// Gives MLX's errors inside the body to the handler. Outside of any, an error ends the process.
public func withErrorHandler<R>(
    _ handler: @escaping @Sendable (String) -> Void, _ body: () throws -> R
) rethrows -> R {
    try ErrorHandler.$current.withValue(.init(call: handler), operation: body)
}

public func withErrorHandler<R>(
    _ handler: @escaping @Sendable (String) -> Void, _ body: () async throws -> R
) async rethrows -> R {
    try await ErrorHandler.$current.withValue(.init(call: handler), operation: body)
}

public enum MLXError: LocalizedError, Sendable, Equatable {
    case caught(String)

    public var errorDescription: String? {
        switch self {
        case .caught(let message): "MLX Error: \(message)"
        }
    }
}

/// The first error of a `withError` body.
public final class ErrorBox: @unchecked Sendable {
    private let lock = NSLock()
    private var stored: Error?

    public var firstError: Error? {
        get { lock.withLock { stored } }
        set { lock.withLock { stored = stored ?? newValue } }
    }

    public func check() throws {
        if let firstError { throw firstError }
    }
}

/// (A struct, since a task-local closure has crashed in optimized builds of Swift 6.3.)
private struct ErrorHandler: Sendable {
    let call: @Sendable (String) -> Void

    @TaskLocal static var current: ErrorHandler?

    static let installed: Void = {
        mlx_set_error_handler(
            { message, _ in
                let message = message.map { String(cString: $0) } ?? ""
                guard let handler = ErrorHandler.current else { fatalError(message) }
                handler.call(message)
            }, nil, nil)
        endWithoutDestructors()
    }()
}

/// Ends the process without the destructors of MLX's static objects, which threads may still use: a
/// process whose tests had all passed was aborted by malloc.
private func endWithoutDestructors() {
    // What is registered last runs first, so these objects must exist.
    var key = mlx_array_new()
    mlx_random_key(&key, 0)
    mlx_array_eval(key)
    mlx_array_free(key)
    on_exit(
        { status, _ in
            fflush(nil)
            _exit(status)
        }, nil)
}

func initError() { ErrorHandler.installed }
