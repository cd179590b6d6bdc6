/// A chat: the model's own caches, made when they are first needed, or those that it is given.
public final class ChatSession {
    private final class Held: @unchecked Sendable {
        var caches: [KVCache]?

        init(_ caches: [KVCache]?) { self.caches = caches }
    }

    private let model: ModelContainer
    public var instructions: String?
    public var generateParameters: GenerateParameters
    public var additionalContext: [String: any Sendable]?
    private let held: Held

    public init(
        _ model: ModelContainer, instructions: String? = nil,
        generateParameters: GenerateParameters = .init(),
        additionalContext: [String: any Sendable]? = nil
    ) {
        self.model = model
        self.instructions = instructions
        self.generateParameters = generateParameters
        self.additionalContext = additionalContext
        held = Held(nil)
    }

    public init(
        _ model: ModelContainer, instructions: String? = nil, cache: consuming [KVCache],
        generateParameters: GenerateParameters = .init(),
        additionalContext: [String: any Sendable]? = nil
    ) {
        self.model = model
        self.instructions = instructions
        self.generateParameters = generateParameters
        self.additionalContext = additionalContext
        held = Held(cache)
    }

    public func respond(to prompt: String) async throws -> String {
        let parameters = generateParameters, held = held, context = additionalContext
        let messages = (instructions.map { [("system", $0)] } ?? []) + [("user", prompt)]
        return try await model.perform { model in
            let caches = held.caches ?? model.model.newCache(parameters: parameters)
            held.caches = caches
            let said = messages.map {
                Chat.Message(role: $0.0 == "system" ? .system : .user, content: $0.1)
            }
            let input = try await model.processor.prepare(
                input: UserInput(chat: said, additionalContext: context))
            let iterator = try TokenIterator(
                input: input, model: model.model, cache: caches, parameters: parameters)
            let (stream, task) = generateTask(
                promptTokenCount: input.text.tokens.size,
                modelConfiguration: model.configuration, tokenizer: model.tokenizer,
                iterator: iterator)
            var reply = ""
            for await part in stream { reply += part.chunk ?? "" }
            await task.value
            return reply
        }
    }

    /// Forget everything said; the next caches are the model's own.
    public func clear() async { await model.perform { [held] _ in held.caches = nil } }

    /// For tests.
    func withCache<R: Sendable>(_ body: @Sendable ([KVCache]?) throws -> R) async rethrows -> R? {
        try await model.perform { [held] _ in try body(held.caches) }
    }
}
