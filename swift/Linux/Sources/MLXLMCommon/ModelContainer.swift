public struct ModelConfiguration: Sendable {
    public var extraEOSTokens: Set<String>
    public var eosTokenIds: Set<Int>

    public init(id: String, extraEOSTokens: Set<String> = [], eosTokenIds: Set<Int> = []) {
        (self.extraEOSTokens, self.eosTokenIds) = (extraEOSTokens, eosTokenIds)
    }
}

/// A model, and what belongs to it.
public struct ModelContext {
    public var configuration: ModelConfiguration
    public var model: any LanguageModel
    public var processor: any UserInputProcessor
    public var tokenizer: any Tokenizer

    public init(
        configuration: ModelConfiguration, model: any LanguageModel,
        processor: any UserInputProcessor, tokenizer: any Tokenizer
    ) {
        self.configuration = configuration
        self.model = model
        self.processor = processor
        self.tokenizer = tokenizer
    }
}

/// A model that one task at a time works with.
public final class ModelContainer: @unchecked Sendable {
    private var context: ModelContext
    private let lock = Lock()

    /// Held over suspensions, by one task after the other.
    private actor Lock {
        private var isHeld = false
        private var waiting: [CheckedContinuation<Void, Never>] = []

        func take() async {
            guard isHeld else {
                isHeld = true
                return
            }
            await withCheckedContinuation { waiting.append($0) }
        }

        func release() {
            if waiting.isEmpty { isHeld = false } else { waiting.removeFirst().resume() }
        }
    }

    public init(context: consuming ModelContext) { self.context = context }

    public func perform<R: Sendable>(
        _ action: @Sendable (ModelContext) async throws -> sending R
    ) async rethrows -> sending R {
        await lock.take()
        do {
            let result = try await action(context)
            await lock.release()
            return result
        } catch {
            await lock.release()
            throw error
        }
    }

    public func update(_ action: @Sendable (inout ModelContext) -> Void) async {
        await lock.take()
        action(&context)
        await lock.release()
    }
}
