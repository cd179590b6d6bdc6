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
/// Images, videos, tools and a history are what they are in `ChatSession`. One turn after the other:
/// sessions of one container wait for each other, but not for tools that run.
public final class H2OChatSession: Sendable {
    private let container: ModelContainer
    private let configuration: H2OConfiguration
    private let reading: H2OReading
    private let readingProgress: @Sendable (Int, Int) -> Void
    private let instructions: String?
    private let parameters: GenerateParameters
    private let processing: UserInput.Processing
    private let additionalContext: [String: any Sendable]?
    private let tools: [ToolSpec]?
    private let toolDispatch: (@Sendable (ToolCall) async throws -> String)?
    private let memory: ChatMemory

    /// - Parameters:
    ///   - container: The model.
    ///   - configuration: How its caches are bounded.
    ///   - reading: How what is new in a turn is read where it is longer than the memory, a document say; turns
    ///     with images or videos are read once.
    ///   - readingProgress: Called while it is read twice, with the tokens done, of which there are two for
    ///     each, and all of them.
    ///   - instructions: What the model is told first.
    ///   - history: What was said after them, read with the first turn.
    ///   - caches: Caches that have read the beginning of the conversation, in the place of
    ///     instructions and history: of ``H2OConfiguration/caches(for:)-(ModelContainer)``, say.
    ///   - tokens: What they have read, for ``transcript`` and ``save(to:)``.
    ///   - parameters: How to generate; `maxKVSize` is not looked at.
    ///   - processing: How images and videos are made smaller.
    ///   - additionalContext: Values for the chat template.
    ///   - tools: What the model may call.
    ///   - toolDispatch: Answers a call; the model then goes on. Without, calls are in
    ///     ``streamDetails(to:)``, and the app answers with ``respond(to:)``.
    public init(
        _ container: ModelContainer, h2o configuration: H2OConfiguration = .default,
        reading: H2OReading = .once,
        readingProgress: @escaping @Sendable (_ done: Int, _ all: Int) -> Void = { _, _ in },
        instructions: String? = nil, history: consuming [Chat.Message] = [],
        caches: sending [any KVCache] = [], tokens: [Int] = [],
        parameters: GenerateParameters = GenerateParameters(),
        processing: UserInput.Processing = .init(resize: CGSize(width: 512, height: 512)),
        additionalContext: [String: any Sendable]? = nil, tools: [ToolSpec]? = nil,
        toolDispatch: (@Sendable (ToolCall) async throws -> String)? = nil
    ) {
        var parameters = parameters
        parameters.maxKVSize = nil  // mlx-swift-lm's main refuses it with caches handed in
        (self.container, self.configuration) = (container, configuration)
        (self.reading, self.readingProgress) = (reading, readingProgress)
        (self.instructions, self.parameters) = (instructions, parameters)
        (self.processing, self.additionalContext) = (processing, additionalContext)
        (self.tools, self.toolDispatch) = (tools, toolDispatch)
        memory = ChatMemory(history, caches, tokens)
    }

    /// The model's reply.
    ///
    /// - Parameters:
    ///   - prompt: What the user says.
    ///   - images: What the user shows, for models that see.
    ///   - videos: What the user shows, for models that see.
    /// - Throws: ``H2OError``: what the model cannot be bounded by; the template's or a tool's error.
    public func respond(
        to prompt: String, images: consuming [UserInput.Image] = [],
        videos: consuming [UserInput.Video] = []
    ) async throws -> String {
        try await respond(to: [.user(prompt, images: images, videos: videos)])
    }

    /// The model's reply to messages of any roles, answers of tools say.
    public func respond(to messages: consuming [Chat.Message]) async throws -> String {
        var reply = ""
        for try await chunk in streamResponse(to: messages) { reply += chunk }
        return reply
    }

    /// The model's reply as it comes.
    public func streamResponse(
        to prompt: String, images: consuming [UserInput.Image] = [],
        videos: consuming [UserInput.Video] = []
    ) -> AsyncThrowingStream<String, any Error> {
        streamResponse(to: [.user(prompt, images: images, videos: videos)])
    }

    /// The same to messages of any roles.
    public func streamResponse(
        to messages: consuming [Chat.Message]
    ) -> AsyncThrowingStream<String, any Error> { stream(messages) { $0.chunk } }

    /// The reply with tool calls that are not dispatched, and figures, of which `promptTokenCount` is the
    /// tokens read.
    public func streamDetails(
        to prompt: String, images: consuming [UserInput.Image] = [],
        videos: consuming [UserInput.Video] = []
    ) -> AsyncThrowingStream<Generation, any Error> {
        streamDetails(to: [.user(prompt, images: images, videos: videos)])
    }

    /// The same to messages of any roles.
    public func streamDetails(
        to messages: consuming [Chat.Message]
    ) -> AsyncThrowingStream<Generation, any Error> { stream(messages) { $0 } }

    /// Begin a turn in which only a part of what was attended to before counts.
    ///
    /// - Parameter carry: As of ``H2OKVCache/newTurn(carry:)``.
    public func newTurn(carry: Double) async throws {
        try await withCaches {
            for case let cache as H2OKVCache in $0 { try cache.newTurn(carry: carry) }
        }
    }

    /// Forget everything said, the history too; what comes next is bounded as before.
    public func clear() async {
        await container.perform { [memory] _ in memory.clear() }
    }

    /// What was asked for and the conversation's caches do not have; nothing before the first turn.
    public var notices: [H2ONotice] { get async { await withCaches { $0.notices } } }

    /// Look at the conversation's caches, or pin and resize them, between turns.
    ///
    ///     let bytes = await session.withCaches { H2OKVCache.describe($0).reduce(0) { $0 + $1.nbytes } }
    ///
    /// - Parameter body: What to do with them; there are none before the first turn.
    public func withCaches<Result: Sendable>(
        _ body: @Sendable ([any KVCache]) throws -> Result
    ) async rethrows -> Result {
        try await container.perform { [memory] _ in try body(memory.caches ?? []) }
    }

    /// The text of all that the model has read and said, with the chat template's markers.
    public var transcript: String {
        get async {
            await container.perform { [memory] context in
                context.tokenizer.decode(tokenIds: memory.tokens + memory.pending)
            }
        }
    }

    /// Write the conversation's memory and tokens, in the file that `mlx_h2o chat` writes too.
    ///
    /// It waits for the end of a reply. A file of that name is replaced once all is on disk.
    ///
    /// - Throws: ``H2OError/file(_:)`` before the first turn, for caches that cannot be written or came
    ///   without their tokens, or where the disk is full.
    public func save(to url: URL) async throws {
        try await container.perform { [memory] _ in try memory.save(to: url) }
    }

    /// Go on with a conversation that ``save(to:)`` or `mlx_h2o chat` wrote, or with a document that
    /// `mlx_h2o compress` did, in the place of this one.
    ///
    /// - Throws: ``H2OError/file(_:)`` for a file that is none, or another model's; this conversation
    ///   stays then.
    public func restore(from url: URL) async throws {
        try await container.perform { [memory, configuration] context in
            try memory.restore(from: url, context.model, configuration.pressure)
        }
    }

    /// What the session has between turns.
    var caches: [any KVCache]? { memory.caches }
}

// MARK: a turn

extension H2OChatSession {
    private struct Messages: @unchecked Sendable {
        let list: [Chat.Message]
    }

    private func stream<Part: Sendable>(
        _ messages: consuming [Chat.Message], _ part: @escaping @Sendable (Generation) -> Part?
    ) -> AsyncThrowingStream<Part, any Error> {
        let (stream, continuation) = AsyncThrowingStream<Part, any Error>.makeStream()
        let first = Messages(list: messages)
        let task = Task { [self] in
            do {
                var pending = first
                while !pending.list.isEmpty {
                    let messages = pending
                    let calls = try await container.perform { context in
                        try await self.turn(messages.list, context) { generation in
                            guard let part = part(generation) else { return true }
                            if case .terminated = continuation.yield(part) { return false }
                            return true
                        }
                    }
                    pending = try await answers(to: calls)
                }
                continuation.finish()
            } catch {
                continuation.finish(throwing: error)
            }
        }
        continuation.onTermination = { if case .cancelled = $0 { task.cancel() } }
        return stream
    }

    /// What the app's tools say. The container is free meanwhile, for tools that use its model.
    private func answers(to calls: [ToolCall]) async throws -> Messages {
        var answers: [Chat.Message] = []
        guard let toolDispatch, !Task.isCancelled else { return Messages(list: []) }
        for call in calls {
            answers.append(.tool(try await toolDispatch(call), id: call.id))
        }
        return Messages(list: answers)
    }

    /// Read what is new and generate the reply, within `container.perform`.
    ///
    /// - Returns: The calls that are to be dispatched.
    private func turn(
        _ messages: [Chat.Message], _ context: ModelContext, _ give: (Generation) -> Bool
    ) async throws -> [ToolCall] {
        let caches: [any KVCache]
        if let own = memory.caches {
            caches = own
        } else {
            caches = try await fresh(context)
            memory.lacksTokens = false
        }
        let input = try await newInput(messages, context)
        let earlier = memory.tokens, new = input.text.tokens.flattened().asArray(Int.self)
        let bounded = placedMembers(of: caches).lazy.compactMap { $0.cache as? H2OKVCache }.first
        let offset = bounded?.offset ?? 0
        memory.drop()  // for where reading fails half-way
        let reply = ReplyTokens()
        var calls: [ToolCall] = [], isStop = false
        // Throws what goes wrong in the model or its caches, and cannot be thrown there.
        func generate(_ failure: ErrorBox) async throws {
            let iterator = RecordingIterator(
                iterator: try TokenIterator(
                    input: try readTwice(input, new, context, caches), model: context.model,
                    cache: caches, parameters: parameters),
                reply: reply, failure: failure)
            let (stream, task) = generateTask(
                promptTokenCount: input.text.tokens.size, modelConfiguration: context.configuration,
                tokenizer: context.tokenizer, iterator: iterator, tools: tools)
            for await generation in stream {
                if case .stop = generation.info?.stopReason { isStop = true }
                if toolDispatch != nil, let call = generation.toolCall {
                    calls.append(call)
                } else if !give(generation) {
                    break
                }
            }
            // Over, or left by its reader; then the token being computed is the last.
            task.cancel()
            await task.value
        }
        do {
            try await withError(generate)
        } catch is CancellationError {
            // What was read of a document stays, and the rest is read with the next turn.
            let count = (bounded?.offset ?? offset) - offset
            memory.adopt(
                caches, earlier + new.prefix(count), pending: Array(new.dropFirst(count)))
            throw CancellationError()
        } catch {
            if let failure = caches.lazy.compactMap({ ($0 as? H2OKVCache)?.failure }).first {
                throw failure
            }
            throw error is MLXError ? H2OError.internal(error.localizedDescription) : error
        }
        memory.adopt(caches, earlier + new + reply.tokens, isStop: isStop)
        return calls
    }

    /// Read the beginning of a turn twice, if that is worth while.
    ///
    /// - Returns: What is still to be read.
    private func readTwice(
        _ input: LMInput, _ tokens: [Int], _ context: ModelContext, _ caches: [any KVCache]
    ) throws -> LMInput {
        guard reading != .once, input.image == nil, input.video == nil, input.audio == nil
        else { return input }
        let request = context.tokenizer.encode(text: H2OReading.request, addSpecialTokens: false)
        let done = try reading.read(
            tokens, by: context.model, into: caches, request: request,
            chunk: parameters.prefillStepSize, progress: readingProgress
        ).tokens
        return done == 0 ? input : LMInput(text: input.text[.ellipsis, done...])
    }

    /// Caches for a conversation that begins.
    private func fresh(_ context: ModelContext) async throws -> [any KVCache] {
        var configuration = configuration
        if configuration.pins == .instructions {
            let count = try await H2OConfiguration.tokens(
                of: instructions, context, additionalContext, tools)
            configuration = configuration.pinning(first: count)
        }
        return try configuration.caches(for: context.model)
    }

    /// What of a turn the memory does not hold yet, and the images and videos that belong to it.
    private func newInput(
        _ messages: [Chat.Message], _ context: ModelContext
    ) async throws -> LMInput {
        func prepared(_ messages: [Chat.Message]) async throws -> LMInput {
            try await context.processor.prepare(
                input: UserInput(
                    chat: messages, processing: processing, tools: tools,
                    additionalContext: additionalContext))
        }
        guard memory.caches != nil else {
            let first = instructions.map { [Chat.Message.system($0)] } ?? []
            return try await prepared(first + memory.history + messages)
        }
        // What follows a reply, whatever it was: where two short conversations with different replies
        // are the same again.
        let input = try await prepared([.user("?"), .assistant("yes")] + messages)
        let other = try await prepared([.user("?"), .assistant("no")] + messages)
        let renderings = [input, other].map { $0.text.tokens.flattened().asArray(Int.self) }
        let same = zip(renderings[0].reversed(), renderings[1].reversed()).prefix { $0 == $1 }.count
        guard 1 ..< renderings.map(\.count).min()! ~= same else {
            throw H2OError.configuration(
                "This model's chat template does not tell where a reply ends: use ChatSession.")
        }
        let tokens = MLXArray(memory.following(renderings[0].suffix(same)).map { Int32($0) })
        return LMInput(
            text: LMInput.Text(
                tokens: input.text.tokens.ndim == 2 ? tokens.expandedDimensions(axis: 0) : tokens),
            image: input.image, video: input.video, audio: input.audio)
    }
}

/// What a session has between turns; touched within `container.perform` alone.
private final class ChatMemory: @unchecked Sendable {
    private(set) var caches: [any KVCache]?
    /// The tokens that the caches have read, by position.
    private(set) var tokens: [Int] = []
    /// Tokens that were said and that the caches have not read.
    private(set) var pending: [Int] = []
    /// Whether the last token ended the reply and is no part of it.
    private var isStop = false
    /// What was said before the first turn.
    private(set) var history: [Chat.Message]
    /// Whether the first caches came without the tokens that they have read.
    var lacksTokens: Bool
    /// What the file of the conversation says about its model, for Python.
    private var about: [String: String] = [:]

    /// Under which a file's metadata has the tokens (python/mlx_h2o/chat/dialogue.py).
    private static let key = "mlx-h2o dialogue"

    init(_ history: [Chat.Message], _ caches: [any KVCache], _ tokens: [Int]) {
        self.history = history
        lacksTokens = tokens.isEmpty && caches.contains { $0.offset > 0 }
        if !caches.isEmpty { (self.caches, self.tokens) = (caches, tokens) }
    }

    /// Begin anew, with the history.
    func drop() { (caches, tokens, pending, isStop) = (nil, [], [], false) }

    func clear() {
        drop()
        (history, about, lacksTokens) = ([], [:], false)
    }

    func adopt(_ caches: [any KVCache], _ tokens: [Int], pending: [Int] = [], isStop: Bool = false)
    {
        (self.caches, self.tokens) = (caches, tokens)
        (self.pending, self.isStop) = (pending, isStop)
    }

    /// What is left to read before a turn, of the tokens that follow a reply in the chat template.
    ///
    /// A model stops with a token of its own. Most often it is the template's first here, and a document
    /// in the template ends with more of them; another one is taken back where it can be.
    func following(_ template: ArraySlice<Int>) -> [Int] {
        let ends = tokens + pending
        let overlap = stride(from: template.count, to: 0, by: -1).first {
            ends.suffix($0).elementsEqual(template.prefix($0))
        }
        if let overlap { return pending + template.dropFirst(overlap) }
        let bounded = (caches ?? []).compactMap { $0 as? H2OKVCache }
        if isStop, bounded.count == caches?.count, bounded.allSatisfy({ $0.undoableSteps > 0 }) {
            for cache in bounded { cache.trim(1) }
            tokens.removeLast()
        }
        return pending + template
    }

    func save(to url: URL) throws {
        guard let caches else {
            throw H2OError.file("There is nothing to save yet.")
        }
        guard !lacksTokens else {
            throw H2OError.file(
                "The session's caches came without the tokens that they have read: give them to the "
                    + "initialiser too.")
        }
        func list(_ tokens: [Int]) -> H2OSettingValue { .array(tokens.map { .int($0) }) }
        let state = H2OSettingValue.object([
            "tokens": list(tokens), "pending": list(pending), "is_stop": .bool(isStop),
        ])
        try H2OKVCache.saveCaches(
            caches, to: url, metadata: about.merging([Self.key: state.text]) { $1 })
    }

    func restore(from url: URL, _ model: any LanguageModel, _ pressure: H2OMemoryPressure?) throws {
        let (caches, metadata) = try H2OKVCache.loadCaches(
            from: url, for: model, pressure: pressure)
        guard let text = metadata[Self.key], let state = try? H2OSettingValue(parsing: text),
            let tokens = state["tokens"]?.array?.compactMap(\.int),
            let pending = state["pending"]?.array?.compactMap(\.int)
        else {
            throw H2OError.file("\(url.path) holds no conversation.")
        }
        lacksTokens = false
        adopt(caches, tokens, pending: pending, isStop: state["is_stop"]?.bool ?? false)
        (history, about) = ([], metadata.filter { ["model", "fingerprint"].contains($0.key) })
    }
}

/// The tokens of a reply so far, all of which the caches have read.
private final class ReplyTokens {
    var tokens: [Int] = []
}

private struct RecordingIterator: TokenIteratorProtocol {
    var iterator: TokenIterator
    let reply: ReplyTokens
    let failure: ErrorBox

    var maxTokens: Int? { iterator.maxTokens }
    var tokenCount: Int { iterator.tokenCount }
    var promptPrefillTime: TimeInterval { iterator.promptPrefillTime }

    mutating func next() -> Int? {
        guard let token = iterator.next(), failure.firstError == nil else { return nil }
        reply.tokens.append(token)
        return token
    }
}
