import Foundation
import MLX
import MLXLLM
import MLXLMCommon
import MLXNN
import Testing

@testable import MLXH2O

/// Conversations in bounded memory.
@Suite(.serialized) struct ChatSessionTests {
    private func container(
        stock: Bool = false, stop: Int = Letters.end, count: TokenCount = TokenCount()
    ) throws -> ModelContainer {
        let data = Data(ModelTests.config.utf8)
        // A random state of its own, since other suites run at the same time.
        let inner = try withRandomState(MLXRandom.RandomState(seed: 7)) { () -> any LLMModel in
            let model: any LLMModel =
                stock
                ? Qwen3Model(try JSONDecoder().decode(Qwen3Configuration.self, from: data))
                : try H2OTransformer(
                    configurationData: data, h2o: H2OConfiguration(budget: .tokens(40)))
            eval(model)
            return model
        }
        let tokenizer = Letters()
        return ModelContainer(
            context: ModelContext(
                configuration: ModelConfiguration(id: "letters", eosTokenIds: [stop]),
                model: Counting(inner, count), processor: Templates(tokenizer: tokenizer),
                tokenizer: tokenizer))
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
        var said: [Chat.Message] = [.system("be brief")], told: [Int] = [], whole: [Int] = []
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
            told.append(read)
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
        #expect(whole.last! > 2 * told.last!)
    }

    @Test func memoryStaysBoundedAndClears() async throws {
        let configuration = try H2OConfiguration(budget: .tokens(64))
        let session = H2OChatSession(
            try container(), h2o: configuration, parameters: parameters(24))
        var replies: [String] = []
        for _ in 0 ..< 2 {
            for prompt in prompts { replies.append(try await session.respond(to: prompt)) }
            let caches = session.held!.map { $0 as! H2OKVCache }
            #expect(caches.allSatisfy { $0.physicalLength <= 64 && $0.evicted > 0 })
            await session.clear()
            #expect(session.held == nil)
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
            let offsets = Set(session.held!.map(\.offset))
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
        #expect(try await other.respond(to: prompts[2]) == expected)
        // A file of caches that is no conversation leaves this one as it is.
        try H2OKVCache.saveCaches(session.held!, to: url)
        await #expect(throws: H2OError.self) { try await other.restore(from: url) }
        #expect(try await other.respond(to: prompts[3]) == session.respond(to: prompts[3]))
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
            for case let cache as H2OKVCache in session.held! {
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
            let cache = session.held![0] as! H2OKVCache, before = cache.offset
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

    @Test func whatCannotBeBoundedIsToldBeforeAnythingIsRead() async throws {
        let session = H2OChatSession(try container(stock: true), h2o: .h2o)
        await #expect(throws: H2OError.self) { try await session.respond(to: "hello") }
    }
}

/// Tokens that a model was asked for by chunks.
private final class TokenCount: @unchecked Sendable {
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
private struct Letters: Tokenizer {
    static let start = 0, end = 1
    private static let letters = Array("abcdefghijklmnopqrstuvwxyz .?")

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
        text.map { 2 + Self.letters.firstIndex(of: $0)! }
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

    func prepare(input: UserInput) async throws -> LMInput {
        guard case .chat(let messages) = input.prompt else { throw H2OError.file("no chat") }
        return LMInput(tokens: MLXArray(tokenizer.rendered(messages).map { Int32($0) }))
    }
}
