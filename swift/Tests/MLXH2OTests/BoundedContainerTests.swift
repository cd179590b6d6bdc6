import Foundation
import MLX
import MLXLLM
import MLXNN
import Testing

@testable import MLXH2O
@testable import MLXLMCommon

/// Stock models in a container, unchanged, and chats with them.
@Suite(.serialized) struct BoundedContainerTests {
    private static func container(_ model: any LanguageModel) -> ModelContainer {
        let tokenizer = Numbers()
        return ModelContainer(
            context: ModelContext(
                configuration: ModelConfiguration(id: "numbers"), model: model,
                processor: Prompts(tokenizer: tokenizer), tokenizer: tokenizer))
    }

    private static let parameters = GenerateParameters(maxTokens: 16, temperature: 0)

    private func layers(_ session: ChatSession) async -> [(
        kind: String, physical: Int, offset: Int
    )] {
        let layers = await session.withCache { caches in
            (caches ?? []).map {
                (
                    kind: "\(type(of: $0))", physical: ($0 as? H2OKVCache)?.physicalLength ?? -1,
                    offset: $0.offset
                )
            }
        }
        return layers ?? []
    }

    /// `clear()` has the session ask the model for new caches.
    @Test func sessionsStayBoundedAfterTheyAreCleared() async throws {
        let container = Self.container(try ModelTests.stock())
        let configuration = try H2OConfiguration(budget: .tokens(40))
        let session = try await ChatSession(
            container, h2o: configuration, generateParameters: Self.parameters)
        var replies: [[String]] = [[], []]
        for round in 0 ..< 2 {
            for turn in 0 ..< 3 {
                replies[round].append(try await session.respond(to: "message \(turn)"))
            }
            let caches = await layers(session)
            #expect(caches.count == 3 && caches.allSatisfy { $0.kind == "H2OKVCache" })
            #expect(caches.allSatisfy { $0.physical <= 40 && $0.offset > 70 })
            await session.clear()
        }
        #expect(replies[0] == replies[1])
        // The container that was given makes what it always made.
        let plain = ChatSession(container, generateParameters: Self.parameters)
        _ = try await plain.respond(to: "message 0")
        #expect(await layers(plain).allSatisfy { $0.kind == "KVCacheSimple" })
    }

    /// What `caches(for:)` returns may be sent anywhere.
    @Test func cachesOfAContainerGoIntoASession() async throws {
        let container = Self.container(try ModelTests.stock())
        let configuration = try H2OConfiguration(budget: .tokens(40))
        let caches = try await configuration.caches(for: container)
        let session = ChatSession(container, cache: caches, generateParameters: Self.parameters)
        let bounded = try await ChatSession(
            container, h2o: configuration, generateParameters: Self.parameters)
        for turn in 0 ..< 3 {
            let reply = try await session.respond(to: "message \(turn)")
            #expect(try await bounded.respond(to: "message \(turn)") == reply)
        }
        let sent = try await configuration.caches(for: container)
        let count = await Task.detached { sent.count }.value
        #expect(count == 3)
    }

    @Test func whatCannotBeIsRefusedAtOnce() async throws {
        let container = Self.container(try ModelTests.stock())
        await #expect(throws: H2OError.policyNeedsAttention(policy: "h2o", model: "Qwen3Model")) {
            try await H2OConfiguration.h2o.bounding(container)
        }
        #if canImport(DispatchMemoryPressure)
            let other = Self.container(Seeing(try ModelTests.stock()))
            await #expect(throws: H2OError.self) {
                try await H2OConfiguration.default.bounding(other)
            }
            let caches = try await H2OConfiguration.default.caches(for: other)
            #expect(caches.count == 3)
        #endif
    }
}

#if canImport(DispatchMemoryPressure)  // the stand-ins: `prepare` has other names in each version
    /// A model that is none of MLXLLM, as those that see are.
    private final class Seeing: Module, LanguageModel {
        let inner: Qwen3Model

        init(_ inner: Qwen3Model) { self.inner = inner }

        func prepare(_ input: LMInput, cache: [any KVCache], windowSize: Int?) throws
            -> PrepareResult
        {
            .tokens(input.text)
        }

        func callAsFunction(_ inputs: MLXArray, cache: [any KVCache]?) -> MLXArray {
            inner(inputs, cache: cache)
        }

        func newCache(parameters: GenerateParameters?) -> [any KVCache] {
            inner.newCache(parameters: parameters)
        }
    }
#endif

/// A token is a byte.
private struct Numbers: Tokenizer {
    var bosToken: String? { nil }
    var eosToken: String? { nil }
    var unknownToken: String? { nil }

    func encode(text: String, addSpecialTokens: Bool) -> [Int] { text.utf8.map { Int($0) % 128 } }
    func decode(tokenIds: [Int], skipSpecialTokens: Bool) -> String {
        tokenIds.map(String.init).joined(separator: " ")
    }
    func convertTokenToId(_ token: String) -> Int? { Int(token) }
    func convertIdToToken(_ id: Int) -> String? { String(id) }

    func applyChatTemplate(
        messages: [[String: any Sendable]], tools: [[String: any Sendable]]?,
        additionalContext: [String: any Sendable]?
    ) throws -> [Int] {
        messages.flatMap { encode(text: $0["content"] as? String ?? "", addSpecialTokens: false) }
    }
}

private struct Prompts: UserInputProcessor {
    let tokenizer: Numbers

    func prepare(input: UserInput) throws -> LMInput {
        guard case .chat(let messages) = input.prompt else { return LMInput(tokens: MLXArray([0])) }
        let tokens = try tokenizer.applyChatTemplate(
            messages: DefaultMessageGenerator().generate(messages: messages), tools: nil,
            additionalContext: nil)
        return LMInput(tokens: MLXArray(tokens.map { Int32($0) }))
    }
}
