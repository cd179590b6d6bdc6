import Foundation
import MLX
import MLXLLM
import MLXLMCommon
import MLXNN
import Testing

@testable import MLXH2O

/// Conversations in bounded memory.
@Suite(.serialized) struct ChatSessionTests {
    func container(
        stock: Bool = false, stop: Int = Letters.end, count: TokenCount = TokenCount(),
        script: Script? = nil
    ) throws -> ModelContainer {
        let inner: any LLMModel = stock ? try ModelTests.stock() : try ModelTests.own()
        let tokenizer = Letters()
        return ModelContainer(
            context: ModelContext(
                configuration: ModelConfiguration(id: "letters", eosTokenIds: [stop]),
                model: script.map { Scripted(inner, $0) } ?? Counting(inner, count),
                processor: Templates(tokenizer: tokenizer, script: script), tokenizer: tokenizer))
    }

    private func parameters(_ tokens: Int) -> GenerateParameters {
        GenerateParameters(maxTokens: tokens, temperature: 3, prefillStepSize: 32, seed: 5)
    }

    private let prompts = ["tell me of rome", "and of naples then", "why", "thank you"]

    /// Each turn what the user says and the template around it is read, though no reply comes out of
    /// the tokenizer as the tokens that were said.
    @Test(arguments: [true, false]) func onlyWhatIsNewIsRead(_ stock: Bool) async throws {
        let count = TokenCount(), tokenizer = Letters()
        let session = H2OChatSession(
            try container(stock: stock, count: count),
            h2o: try H2OConfiguration(budget: .tokens(64)),
            instructions: "be brief", parameters: parameters(24))
        var said: [Chat.Message] = [.system("be brief")], tokensRead: [Int] = [], whole: [Int] = []
        for (turn, prompt) in prompts.enumerated() {
            count.prompt = 0
            var reply = "", read = 0, tokens = 0
            for try await part in session.streamDetails(to: prompt) {
                reply += part.chunk ?? ""
                read = part.info?.promptTokenCount ?? read
                tokens = part.info?.generationTokenCount ?? tokens
            }
            #expect(tokenizer.encode(text: reply).count != tokens)
            said.append(.user(prompt))
            tokensRead.append(read)
            whole.append(tokenizer.rendered(said).count)
            said.append(.assistant(reply))
            // A turn's markers and words; of the first one the instructions too.
            let new = tokenizer.rendered([.user(prompt)]).count
            let closing = turn == 0 ? tokenizer.rendered([.system("be brief")]).count - 2 : 1
            #expect(read <= new + closing && read >= new, "\(read) of \(new)")
            // The trial of the first turn reads a token, and so does a chunk of one.
            #expect(count.prompt == read || read == 1, "\(count.prompt) \(read)")
        }
        // What is read where a session begins anew.
        #expect(whole.last! > 2 * tokensRead.last!)
    }

    @Test func memoryStaysBoundedAndClears() async throws {
        let configuration = try H2OConfiguration(budget: .tokens(64))
        let session = H2OChatSession(
            try container(), h2o: configuration, parameters: parameters(24))
        var replies: [String] = []
        for _ in 0 ..< 2 {
            for prompt in prompts { replies.append(try await session.respond(to: prompt)) }
            let caches = session.caches!.map { $0 as! H2OKVCache }
            #expect(caches.allSatisfy { $0.physicalLength <= 64 && $0.evicted > 0 })
            await session.clear()
            #expect(session.caches == nil)
        }
        #expect(Array(replies[..<4]) == Array(replies[4...]))
    }

    @Test func streamedInPiecesItIsTheSame() async throws {
        let configuration = try H2OConfiguration(budget: .tokens(64))
        let container = try container()
        let one = H2OChatSession(container, h2o: configuration, parameters: parameters(12))
        let other = H2OChatSession(container, h2o: configuration, parameters: parameters(12))
        for prompt in prompts {
            var pieces: [String] = []
            for try await piece in one.streamResponse(to: prompt) { pieces.append(piece) }
            #expect(try await other.respond(to: prompt) == pieces.joined() && pieces.count > 1)
        }
    }

    /// A reply without end ends with its reader, and the conversation goes on from what was said.
    @Test(.timeLimit(.minutes(2))) func aReplyCanBeLeft() async throws {
        let container = try container()
        let session = H2OChatSession(
            container, h2o: try H2OConfiguration(budget: .tokens(64)),
            parameters: GenerateParameters(temperature: 3, prefillStepSize: 32, seed: 5))
        var last = 0
        for (prompt, count) in zip(prompts, [3, 5]) {
            var pieces = 0
            for try await _ in session.streamResponse(to: prompt) {
                pieces += 1
                if pieces == count { break }
            }
            // The next call for the container has it when the reply is over.
            await container.perform { _ in }
            let offsets = Set(session.caches!.map(\.offset))
            #expect(offsets.count == 1 && offsets.first! >= last + count)
            last = offsets.first!
        }
    }

    @Test func savedAndRestoredItGoesOn() async throws {
        let url = FileManager.default.temporaryDirectory.appendingPathComponent(
            "chat-\(ProcessInfo.processInfo.processIdentifier).safetensors")
        defer { try? FileManager.default.removeItem(at: url) }
        let configuration = try H2OConfiguration(budget: .tokens(64))
        let container = try container()
        let session = H2OChatSession(container, h2o: configuration, parameters: parameters(16))
        await #expect(throws: H2OError.self) { try await session.save(to: url) }
        for prompt in prompts[..<2] { _ = try await session.respond(to: prompt) }
        try await session.save(to: url)
        let expected = try await session.respond(to: prompts[2])
        let other = H2OChatSession(container, h2o: configuration, parameters: parameters(16))
        try await other.restore(from: url)
        let transcript = await other.transcript
        #expect(prompts[..<2].allSatisfy(transcript.contains))
        #expect(try await other.respond(to: prompts[2]) == expected)
        #expect(await other.transcript == session.transcript)
        // Each token that the caches have read is in the file, as Python wants it.
        let (caches, metadata) = try H2OKVCache.loadedCaches(from: url)
        let dialogue = try H2OSettingValue(parsing: metadata["mlx-h2o dialogue"]!)
        #expect(dialogue["tokens"]!.array!.count == caches[0].offset)
        #expect(dialogue["pending"]!.array!.isEmpty)
        // A file of caches that is no conversation leaves this one as it is.
        try H2OKVCache.saveCaches(session.caches!, to: url)
        await #expect(throws: H2OError.self) { try await other.restore(from: url) }
        #expect(try await other.respond(to: prompts[3]) == session.respond(to: prompts[3]))
    }

    /// A document that was read elsewhere, in the template or not: a turn reads what it did not end with.
    @Test func aDocumentIsGoneOnWith() async throws {
        let url = temporaryFile()
        defer { try? FileManager.default.removeItem(at: url) }
        let container = try container(), letters = Letters()
        let inTemplate = letters.rendered([.system("a letter")]).dropLast(
            letters.rendered([]).count)
        // What follows a reply: its end, and the turn.
        let rest = letters.rendered([.user("?")]).count + 1
        for (document, known) in [(Array(inTemplate), 1), (letters.encode(text: "a letter"), 0)] {
            let state = H2OSettingValue.object([
                "tokens": .array(document.map { .int($0) }), "pending": .array([]),
            ])
            try await container.perform { context in
                let caches = try H2OConfiguration(budget: .tokens(64)).caches(for: context.model)
                _ = context.model(MLXArray(document.map { Int32($0) })[.newAxis], cache: caches)
                try H2OKVCache.saveCaches(
                    caches, to: url, metadata: ["mlx-h2o dialogue": state.text])
            }
            let session = H2OChatSession(container, parameters: parameters(4))
            try await session.restore(from: url)
            var read = 0
            for try await part in session.streamDetails(to: "?") {
                read = part.info?.promptTokenCount ?? read
            }
            #expect(read == rest - known)
        }
    }

    /// A conversation is whole on disk or as it was: a folder that is not there, a file too large.
    @Test func aFailedSaveLeavesTheOldFile() async throws {
        let url = temporaryFile()
        defer { try? FileManager.default.removeItem(at: url) }
        let session = H2OChatSession(try container(), parameters: parameters(4))
        _ = try await session.respond(to: prompts[0])
        try await session.save(to: url)
        let before = try Data(contentsOf: url)
        await #expect(throws: H2OError.self) {
            try await session.save(to: URL(fileURLWithPath: "/nowhere/at/all.safetensors"))
        }
        _ = try await session.respond(to: prompts[1])
        try FileManager.default.createDirectory(
            at: url.appendingPathExtension("d"), withIntermediateDirectories: true)
        await #expect(throws: H2OError.self) {
            try await session.save(to: url.appendingPathExtension("d"))
        }
        try FileManager.default.removeItem(at: url.appendingPathExtension("d"))
        #expect(try Data(contentsOf: url) == before)
    }

    /// Instructions that are pinned stay through all turns, after `clear()` and in a new session.
    @Test(arguments: [true, false]) func pinnedInstructionsStay(_ stock: Bool) async throws {
        let url = temporaryFile()
        defer { try? FileManager.default.removeItem(at: url) }
        let configuration = try H2OConfiguration(budget: .tokens(96), pins: .instructions)
        let container = try container(stock: stock), instructions = "be brief and be kind"
        func session() -> H2OChatSession {
            H2OChatSession(
                container, h2o: configuration, instructions: instructions,
                parameters: parameters(24))
        }
        func expectPinned(_ session: H2OChatSession) {
            let end = Letters().rendered([.system(instructions)]).count - 12
            for case let cache as H2OKVCache in session.caches! {
                #expect(cache.pins.count == 1 && cache.pins[0].lowerBound == 0)
                #expect(cache.pins[0].upperBound >= end && cache.evicted > 0)
                for head in try! cache.keptPositions()[0] {
                    #expect(Set(cache.pins[0]).isSubset(of: head))
                }
            }
        }
        let one = session()
        for _ in 0 ..< 2 {
            for prompt in prompts { _ = try await one.respond(to: prompt) }
            expectPinned(one)
            try await one.save(to: url)
            await one.clear()
        }
        let other = session()
        try await other.restore(from: url)
        try await other.newTurn(carry: 0.5)
        for prompt in prompts { _ = try await other.respond(to: prompt) }
        expectPinned(other)
    }

    /// A stop token that the template does not write is taken back where steps can be.
    @Test func aForeignStopTokenIsTakenBack() async throws {
        let first = try await firstToken()
        for undo in [0, 1] {
            let session = H2OChatSession(
                try container(stop: first),
                h2o: try H2OConfiguration(budget: .tokens(24), undo: undo),
                parameters: parameters(1))
            #expect(try await session.respond(to: prompts[0]).isEmpty)
            let cache = session.caches![0] as! H2OKVCache, before = cache.offset
            #expect(cache.evicted > 0)
            var read = 0
            for try await part in session.streamDetails(to: prompts[1]) {
                read = part.info?.promptTokenCount ?? read
            }
            // And the reply's token.
            #expect(cache.offset == before + read + 1 - undo)
            #expect(read == Letters().rendered([.user(prompts[1])]).count + 1)
        }
    }

    /// The first token of a reply to the first prompt.
    private func firstToken() async throws -> Int {
        let container = try container()
        let prompt = Letters().rendered([.user(prompts[0])])
        return try await container.perform { context in
            var iterator = try TokenIterator(
                input: LMInput(tokens: MLXArray(prompt.map { Int32($0) })), model: context.model,
                cache: try H2OConfiguration(budget: .tokens(24)).caches(for: context.model),
                parameters: parameters(1))
            return iterator.next()!
        }
    }

    private static let call = #"<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>"#
    private static let tools: [ToolSpec] = [["name": "add"]]

    /// The model calls, the app answers, the model goes on; the memory holds all of it once.
    @Test func toolsAreCalledAndAnswered() async throws {
        let script = Script([Self.call, Self.call, "it is four", "you are welcome"])
        let container = try container(script: script), instructions = "be brief"
        let session = H2OChatSession(
            container, h2o: try H2OConfiguration(budget: .tokens(256), pins: .instructions),
            instructions: instructions, parameters: parameters(100), tools: Self.tools
        ) { call in
            // A tool may use the model.
            let offset = await container.perform { _ in script.roles.count }
            script.calls.append(call)
            return script.calls.count == 1 ? "not yet \(offset == 2 ? "" : "?")" : "four"
        }
        #expect(try await session.respond(to: "what is two and two") == "it is four")
        #expect(script.calls.map(\.function.name) == ["add", "add"])
        #expect(script.calls[0].function.arguments == ["a": .int(2)])
        #expect(script.roles == [.user, .assistant, .tool])
        let letters = Letters(), cache = session.caches![0] as! H2OKVCache
        func messages(_ more: [Chat.Message]) -> [Int] {
            letters.rendered([.system("tool add"), .system(instructions)] + more)
        }
        let whole = messages([
            .user("what is two and two"), .assistant(Self.call), .tool("not yet "),
            .assistant(Self.call), .tool("four"), .assistant("it is four"),
        ])
        // But for what begins the next reply.
        #expect(cache.offset == whole.count - letters.rendered([]).count)
        #expect(cache.pins[0].upperBound >= messages([]).count - letters.rendered([]).count)
        #expect(try await session.respond(to: "thank you") == "you are welcome")
        #expect(await session.notices.isEmpty)
    }

    /// Without a dispatch the app sees the calls, and answers by a message.
    @Test func callsAreGivenToTheReaderOtherwise() async throws {
        let script = Script([Self.call, "it is four"])
        let session = H2OChatSession(
            try container(script: script), h2o: try H2OConfiguration(budget: .tokens(256)),
            parameters: parameters(100), tools: Self.tools)
        var calls: [ToolCall] = []
        for try await part in session.streamDetails(to: "what is two and two") {
            if let call = part.toolCall { calls.append(call) }
        }
        #expect(calls.map(\.function.name) == ["add"])
        #expect(try await session.respond(to: [.tool("four")]) == "it is four")
    }

    /// It is read with the first turn, and gone with `clear()`.
    @Test func aHistoryGoesOn() async throws {
        let history: [Chat.Message] = [.user("i am ann"), .assistant("hello ann")]
        let session = H2OChatSession(
            try container(), h2o: try H2OConfiguration(budget: .tokens(64)),
            instructions: "be brief", history: history, parameters: parameters(8))
        func read(_ prompt: String) async throws -> Int {
            var read = 0
            for try await part in session.streamDetails(to: prompt) {
                read = part.info?.promptTokenCount ?? read
            }
            return read
        }
        let letters = Letters(), system = [Chat.Message.system("be brief")]
        let whole = letters.rendered(system + history + [.user("why")]).count
        #expect(try await read("why") == whole)
        #expect(try await read("why") <= letters.rendered([.user("why")]).count + 1)
        await session.clear()
        #expect(try await read("why") == letters.rendered(system + [.user("why")]).count)
    }

    /// A turn's images are the model's in that turn, and in no other.
    @Test func imagesReachTheModel() async throws {
        let script = Script(["a dog", "and a cat", "yes"])
        let session = H2OChatSession(
            try container(script: script), h2o: try H2OConfiguration(budget: .tokens(256)),
            parameters: parameters(30), processing: .init(resize: CGSize(width: 2, height: 2)))
        for (prompt, pixel, reply) in [
            ("what is this", 3, "a dog"), ("and this", 4, "and a cat"), ("really", nil, "yes"),
        ] as [(String, Float?, String)] {
            let images = pixel.map { [UserInput.Image.array(MLXArray([$0]))] } ?? []
            #expect(try await session.respond(to: prompt, images: images) == reply)
        }
        #expect(script.images == [[6], [8], nil])
    }

    /// What a cache cannot throw the session does, and begins anew.
    @Test func whatFailsInAStepIsThrown() async throws {
        let script = Script([])
        var policy = H2OPolicies.Own(name: "own", needsAttention: false) { slots in
            script.images.append(nil)
            if script.images.count == 40 { throw H2OError.file("no priority today") }
            return slots.positions.asType(.float32)
        }
        policy.options.evictEvery = 1
        let session = H2OChatSession(
            try container(), h2o: try H2OConfiguration(budget: .tokens(32), policy: policy),
            parameters: parameters(24))
        var failures = 0
        for prompt in prompts + prompts {
            do {
                _ = try await session.respond(to: prompt)
            } catch let error as H2OError {
                guard case .policy = error else { throw error }
                failures += 1
                #expect(session.caches == nil)
            }
        }
        #expect(failures == 1 && session.caches != nil)
    }

    @Test func whatCannotBeBoundedIsToldBeforeAnythingIsRead() async throws {
        let session = H2OChatSession(try container(stock: true), h2o: .h2o)
        await #expect(throws: H2OError.self) { try await session.respond(to: "hello") }
    }
}

/// Tokens that a model was asked for by chunks.
final class TokenCount: @unchecked Sendable {
    var prompt = 0
}

private final class Counting: Module, LLMModel {
    let inner: any LLMModel
    private let count: TokenCount

    init(_ inner: any LLMModel, _ count: TokenCount) {
        self.inner = inner
        self.count = count
    }

    var loraLayers: [Module] { inner.loraLayers }

    func callAsFunction(_ inputs: MLXArray, cache: [any KVCache]?) -> MLXArray {
        if inputs.size > 1 { count.prompt += inputs.size }
        return inner(inputs, cache: cache)
    }

    func newCache(parameters: GenerateParameters?) -> [any KVCache] {
        (0 ..< 3).map { _ in KVCacheSimple() }
    }
}

/// Letters, which it makes tokens of, and pairs of them, which a model may say all the same.
struct Letters: Tokenizer {
    static let start = 0, end = 1
    private static let letters = Array("abcdefghijklmnopqrstuvwxyz .?<>/_{}\":,2")

    let bosToken: String? = nil
    let eosToken: String? = nil
    let unknownToken: String? = nil

    func decode(tokenIds: [Int], skipSpecialTokens: Bool) -> String {
        let letters = Self.letters
        return tokenIds.map { token in
            let place = token - 2
            if place < 0 { return "" }
            if place < letters.count { return String(letters[place]) }
            return String([letters[place % letters.count], letters[place / letters.count]])
        }.joined()
    }

    func encode(text: String, addSpecialTokens: Bool = false) -> [Int] {
        text.lowercased().compactMap { Self.letters.firstIndex(of: $0).map { $0 + 2 } }
    }

    func convertTokenToId(_ token: String) -> Int? { nil }
    func convertIdToToken(_ id: Int) -> String? { nil }

    func applyChatTemplate(
        messages: [[String: any Sendable]], tools: [[String: any Sendable]]?,
        additionalContext: [String: any Sendable]?
    ) throws -> [Int] { [] }

    /// Each message in its markers, then the beginning of a reply.
    func rendered(_ messages: [Chat.Message]) -> [Int] {
        messages.flatMap { message in
            [Self.start] + encode(text: "\(message.role.rawValue). \(message.content)")
                + [Self.end]
        } + [Self.start] + encode(text: "assistant. ")
    }
}

private struct Templates: UserInputProcessor {
    let tokenizer: Letters
    var script: Script?

    func prepare(input: UserInput) async throws -> LMInput {
        guard case .chat(let messages) = input.prompt else { throw H2OError.file("no chat") }
        script?.roles = messages.map(\.role)
        let tools = (input.tools ?? []).map { Chat.Message.system("tool \($0["name"] ?? "")") }
        var image: LMInput.ProcessedImage?
        if case .array(let pixels) = input.images.first {
            image = LMInput.ProcessedImage(pixels: pixels * Float(input.processing.resize!.width))
        }
        let tokens = tokenizer.rendered(tools + messages)
        return LMInput(
            text: LMInput.Text(tokens: MLXArray(tokens.map { Int32($0) })), image: image)
    }
}

/// What a model says, one reply after the other, and what it was given.
final class Script: @unchecked Sendable {
    private var replies: [[Int]]
    private var place = 0
    var roles: [Chat.Message.Role] = []
    /// Pixels of each turn's image.
    var images: [[Float]?] = []
    /// Calls of the app's tools.
    var calls: [ToolCall] = []

    init(_ replies: [String]) {
        self.replies = replies.map { Letters().encode(text: $0) + [Letters.end] }
    }

    /// What follows these tokens: a prompt, or the last word of a reply.
    func next(after tokens: [Int]) -> Int {
        guard let reply = replies.first else { return Letters.end }
        place = place > 0 && tokens == [reply[place - 1]] ? place + 1 : 1
        guard place > reply.count else { return reply[place - 1] }
        replies.removeFirst()
        place = 0
        return Letters.end
    }
}

/// A model whose caches are a model's, and whose words are a script's.
private final class Scripted: Module, LLMModel {
    let inner: any LLMModel
    private let script: Script

    init(_ inner: any LLMModel, _ script: Script) {
        self.inner = inner
        self.script = script
    }

    var loraLayers: [Module] { inner.loraLayers }

    func prepare(_ input: LMInput, cache: [any KVCache], windowSize: Int?) throws -> PrepareResult {
        script.images.append(input.image?.pixels.asArray(Float.self))
        return .tokens(input.text)
    }

    func callAsFunction(_ inputs: MLXArray, cache: [any KVCache]?) -> MLXArray {
        let logits = inner(inputs, cache: cache)
        let said = script.next(after: inputs.flattened().asArray(Int.self))
        let scores = (0 ..< logits.dim(-1)).map { Float($0 == said ? 1000 : 0) }
        return logits + MLXArray(scores)
    }

    func newCache(parameters: GenerateParameters?) -> [any KVCache] {
        (0 ..< 3).map { _ in KVCacheSimple() }
    }
}
