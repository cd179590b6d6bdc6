import Foundation
import MLX
import MLXLMCommon

/// A conversation in bounded memory that reads only what is new: of each turn what the user says, and
/// the few tokens of the chat template around it.
///
/// `ChatSession` renders the whole conversation in every turn, and where a reply does not come out as
/// the tokens that the model said, it takes the difference back, or begins anew if evictions do not
/// let it. Here the memory goes on from the tokens that were said, however text would be tokenized.
///
///     let session = H2OChatSession(container, h2o: configuration)
///     print(try await session.respond(to: "What are two things to see in San Francisco?"))
///     print(try await session.respond(to: "How about a great place to eat?"))
///
/// Text only. One turn after the other: sessions of one container wait for each other.
public final class H2OChatSession: Sendable {
    private let container: ModelContainer
    private let configuration: H2OConfiguration
    private let instructions: String?
    private let parameters: GenerateParameters
    private let additionalContext: [String: any Sendable]?
    private let memory = ChatMemory()

    /// - Parameters:
    ///   - container: The model.
    ///   - configuration: How its caches are bounded.
    ///   - instructions: What the model is told first.
    ///   - parameters: How to generate; `maxKVSize` is not looked at.
    ///   - additionalContext: Values for the chat template.
    public init(
        _ container: ModelContainer, h2o configuration: H2OConfiguration = .default,
        instructions: String? = nil, parameters: GenerateParameters = GenerateParameters(),
        additionalContext: [String: any Sendable]? = nil
    ) {
        var parameters = parameters
        parameters.maxKVSize = nil  // mlx-swift-lm's main refuses it with caches handed in
        self.container = container
        self.configuration = configuration
        self.instructions = instructions
        self.parameters = parameters
        self.additionalContext = additionalContext
    }

    /// The model's reply.
    ///
    /// - Throws: ``H2OError``: what the model cannot be bounded by; or the template's error.
    public func respond(to prompt: String) async throws -> String {
        var reply = ""
        for try await chunk in streamResponse(to: prompt) { reply += chunk }
        return reply
    }

    /// The model's reply as it comes.
    public func streamResponse(to prompt: String) -> AsyncThrowingStream<String, any Error> {
        stream(prompt) { $0.chunk }
    }

    /// The same with tool calls and figures, of which `promptTokenCount` is the tokens read in this
    /// turn.
    public func streamDetails(to prompt: String) -> AsyncThrowingStream<Generation, any Error> {
        stream(prompt) { $0 }
    }

    /// Begin a turn in which only a part of what was attended to before counts.
    ///
    /// - Parameter carry: As of ``H2OKVCache/newTurn(carry:)``.
    public func newTurn(carry: Double) async throws {
        try await container.perform { [memory] _ in
            for case let cache as H2OKVCache in memory.caches ?? [] {
                try cache.newTurn(carry: carry)
            }
        }
    }

    /// Forget everything said; what comes next is bounded as before.
    public func clear() async {
        await container.perform { [memory] _ in memory.clear() }
    }

    /// Write the conversation's memory.
    ///
    /// - Throws: ``H2OError/file(_:)`` before anything was said, or for caches that cannot be written.
    public func save(to url: URL) async throws {
        try await container.perform { [memory] _ in try memory.save(to: url) }
    }

    /// Go on with a conversation that ``save(to:)`` wrote, in the place of this one.
    ///
    /// - Throws: ``H2OError/file(_:)`` for a file that is none, or another model's; this conversation
    ///   stays then.
    public func restore(from url: URL) async throws {
        try await container.perform { [memory, configuration] context in
            try memory.restore(from: url, context.model, configuration.pressure)
        }
    }

    /// What the session holds between turns.
    var held: [any KVCache]? { memory.caches }

    private func stream<Part: Sendable>(
        _ prompt: String, _ part: @escaping @Sendable (Generation) -> Part?
    ) -> AsyncThrowingStream<Part, any Error> {
        let (stream, continuation) = AsyncThrowingStream<Part, any Error>.makeStream()
        let task = Task { [self] in
            do {
                try await container.perform { context in
                    try await self.turn(prompt, context) { generation in
                        guard let part = part(generation) else { return true }
                        if case .terminated = continuation.yield(part) { return false }
                        return true
                    }
                }
                continuation.finish()
            } catch {
                continuation.finish(throwing: error)
            }
        }
        continuation.onTermination = { if case .cancelled = $0 { task.cancel() } }
        return stream
    }

    /// Read what is new and say the reply, with the container held.
    private func turn(
        _ prompt: String, _ context: ModelContext, _ give: (Generation) -> Bool
    ) async throws {
        let caches: [any KVCache]
        if let held = memory.caches { caches = held } else { caches = try await fresh(context) }
        let (tokens, isBatch) = try await newTokens(prompt, context)
        let array = MLXArray(tokens.map { Int32($0) })
        memory.clear()  // for where reading fails half-way
        let said = SaidTokens()
        let iterator = RecordingIterator(
            iterator: try TokenIterator(
                input: LMInput(tokens: isBatch ? array.expandedDimensions(axis: 0) : array),
                model: context.model, cache: caches, parameters: parameters),
            said: said)
        let (stream, task) = generateTask(
            promptTokenCount: tokens.count, modelConfiguration: context.configuration,
            tokenizer: context.tokenizer, iterator: iterator)
        var isStop = false
        for await generation in stream {
            if case .stop = generation.info?.stopReason { isStop = true }
            if !give(generation) { break }
        }
        // Over, or left by its reader; then the token being computed is the last.
        task.cancel()
        await task.value
        memory.note(caches, last: said.last, isStop: isStop)
    }

    /// Caches for a conversation that begins.
    private func fresh(_ context: ModelContext) async throws -> [any KVCache] {
        var configuration = configuration
        if configuration.pins == .instructions {
            let count = try await H2OConfiguration.tokens(
                of: instructions, context, additionalContext)
            configuration = configuration.pinning(first: count)
        }
        return try configuration.caches(for: context.model)
    }

    /// The tokens of a turn that the memory does not hold yet, and whether the model wants them as a
    /// batch of one.
    private func newTokens(
        _ prompt: String, _ context: ModelContext
    ) async throws -> (tokens: [Int], isBatch: Bool) {
        var isBatch = false
        func rendered(_ messages: [Chat.Message]) async throws -> [Int] {
            let input = UserInput(chat: messages, additionalContext: additionalContext)
            let tokens = try await context.processor.prepare(input: input).text.tokens
            isBatch = tokens.ndim == 2
            return tokens.flattened().asArray(Int.self)
        }
        guard memory.caches != nil else {
            let first = instructions.map { [Chat.Message.system($0)] } ?? []
            let tokens = try await rendered(first + [.user(prompt)])
            return (tokens, isBatch)
        }
        // What follows a reply, whatever it was: where two short conversations with different replies
        // are the same again.
        var renderings: [[Int]] = []
        for reply in ["yes", "no"] {
            renderings.append(
                try await rendered([.user("?"), .assistant(reply), .user(prompt)]))
        }
        let same = zip(renderings[0].reversed(), renderings[1].reversed()).prefix { $0 == $1 }.count
        guard 1 ..< renderings.map(\.count).min()! ~= same else {
            throw H2OError.configuration(
                "This model's chat template does not tell where a reply ends: use ChatSession.")
        }
        return (memory.following(Array(renderings[0].suffix(same))), isBatch)
    }
}

/// What a session holds; touched only while its container is held.
private final class ChatMemory: @unchecked Sendable {
    private(set) var caches: [any KVCache]?
    /// The last token that the caches hold, if a reply was said.
    private var last: Int?
    /// Whether it ended the reply and is no part of it.
    private var isStop = false

    private static let key = "mlx-h2o chat"

    func clear() { (caches, last, isStop) = (nil, nil, false) }

    func note(_ caches: [any KVCache], last: Int?, isStop: Bool) {
        (self.caches, self.last, self.isStop) = (caches, last, isStop)
    }

    /// What is left to read of the tokens that follow a reply in the chat template.
    ///
    /// A model stops with a token of its own. Most often it is the template's; another one is taken
    /// back where it can be.
    func following(_ tokens: [Int]) -> [Int] {
        if last == tokens[0] { return Array(tokens.dropFirst()) }
        let bounded = (caches ?? []).compactMap { $0 as? H2OKVCache }
        if isStop, bounded.count == caches?.count, bounded.allSatisfy({ $0.undoableSteps > 0 }) {
            for cache in bounded { cache.trim(1) }
        }
        return tokens
    }

    func save(to url: URL) throws {
        guard let caches else {
            throw H2OError.file("Nothing was said yet that could be saved.")
        }
        let state = H2OSettingValue.object([
            "last": last.map { .int($0) } ?? .null, "is_stop": .bool(isStop),
        ])
        try H2OKVCache.saveCaches(caches, to: url, metadata: [Self.key: state.text])
    }

    func restore(from url: URL, _ model: any LanguageModel, _ pressure: H2OMemoryPressure?) throws {
        let (caches, metadata) = try H2OKVCache.loadCaches(
            from: url, for: model, pressure: pressure)
        guard let text = metadata[Self.key], let state = try? H2OSettingValue(parsing: text),
            let isStop = state["is_stop"]?.bool
        else {
            throw H2OError.file("\(url.path) holds no conversation of an H2OChatSession.")
        }
        note(caches, last: state["last"]?.int, isStop: isStop)
    }
}

/// What an iterator has given, all of which is in the caches.
private final class SaidTokens {
    var last: Int?
}

private struct RecordingIterator: TokenIteratorProtocol {
    var iterator: TokenIterator
    let said: SaidTokens

    var maxTokens: Int? { iterator.maxTokens }
    var tokenCount: Int { iterator.tokenCount }
    var promptPrefillTime: TimeInterval { iterator.promptPrefillTime }

    mutating func next() -> Int? {
        guard let token = iterator.next() else { return nil }
        said.last = token
        return token
    }
}
