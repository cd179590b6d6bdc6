import Foundation
import MLX
import MLXLLM
import MLXLMCommon
import MLXNN
import Testing

@testable import MLXH2O

/// What registered models share with the stock ones in whose place they are.
@Suite(.serialized) struct RegisteredModelTests {
    static let llama = ModelTests.config.replacingOccurrences(of: "qwen3", with: "llama")

    private func registered(
        _ config: String, _ configuration: H2OConfiguration
    ) async throws -> any LanguageModel {
        let type = config.contains("llama") ? "llama" : "qwen3"
        await H2OModels.register(configuration)
        let model = try await LLMTypeRegistry.shared.createModel(
            configuration: Data(config.utf8), modelType: type)
        eval(model)
        return model
    }

    /// Registered twice, as an app does that changes its budget.
    @Test func systemMessagesGoWhereTheTemplateRefusesThem() async throws {
        let messages: [Chat.Message] = [.system("be brief"), .user("hello")]
        for _ in 0 ..< 2 {
            let llama = try #require(try await registered(Self.llama, .default) as? any LLMModel)
            let refused = llama.messageGenerator(tokenizer: Template(refusesSystem: true))
            #expect(refused.generate(messages: messages).count == 1)
            let taken = llama.messageGenerator(tokenizer: Template(refusesSystem: false))
            #expect(taken.generate(messages: messages).count == 2)
        }
    }

    @Test func configurationsMayHaveComments() async throws {
        let text = "// Qwen\n" + ModelTests.config.replacingOccurrences(of: "true}", with: "true,}")
        let model = try await registered(text, .default)
        #expect(model is any H2OModel)
    }

    /// A budget without room is the fewest tokens that there is room with; the process goes on.
    @Test func tooSmallARequestIsTheLeastThatWorks() async throws {
        let model = try await registered(ModelTests.config, H2OConfiguration(budget: .tokens(64)))
        for size in [4, -3] {
            let caches = try model.newCache(parameters: GenerateParameters(maxKVSize: size))
            #expect(try ModelTests.generated(model, caches, tokens: 20).count == 20)
            #expect(caches.allSatisfy { ($0 as! H2OKVCache).evicted > 0 })
        }
        #expect(H2ONotice.all.contains { $0.message.contains("A budget of") })
        let bytes = try await registered(ModelTests.config, H2OConfiguration(budget: .bytes(300)))
        let caches = try bytes.newCache(parameters: nil)
        #expect(try ModelTests.generated(bytes, caches, tokens: 20).count == 20)
    }

    /// What no cache can have is no end of the process: the model's own caches, and the log says so.
    @Test func aRequestThatCannotBeMetIsUnbounded() async throws {
        var impossible = try H2OConfiguration(budget: .tokens(64))
        impossible.saturation = -1
        let other = try await registered(ModelTests.config, impossible)
        #expect(try other.newCache(parameters: nil).allSatisfy { $0 is KVCacheSimple })
        #expect(H2ONotice.all.contains { $0.message.contains("without a bound") })
    }

    @Test func anotherModelsProfileIsUniform() async throws {
        let folder = GoldenReplay.embeddedModel
        let profile = try H2OProfile(
            contentsOf: folder.appendingPathComponent(H2OProfile.fileName))
        let model = try await registered(
            ModelTests.config, H2OConfiguration(budget: .tokens(64), headBudgets: .profile(profile))
        )
        let budgets = try model.newCache(parameters: nil).map { ($0 as! H2OKVCache).budgets! }
        #expect(budgets.allSatisfy { Set($0).count == 1 })
        #expect(H2ONotice.all.contains { $0.message.contains("uniform") })
    }

    /// A reranker may have the type of the model that it was made of.
    @Test func rerankersAreRefusedOrLeftToTheStockRegistry() async throws {
        let ranking = ModelTests.config.replacingOccurrences(
            of: "{\"model_type\"", with: "{\"architectures\": [\"JinaForRanking\"], \"model_type\"")
        do {
            _ = try await registered(ranking, .default)
            Issue.record("a reranker was taken for a model that generates")
        } catch let error as H2OError {
            let message = error.localizedDescription
            for part in ["JinaForRanking", "\"qwen3\"", "[\"llama\", ", "factory(_:)"] {
                #expect(message.contains(part), "\(message)")
            }
        }
        let factory = H2OModels.factory(try H2OConfiguration(budget: .tokens(40)))
        let model = try await factory.typeRegistry.createModel(
            configuration: Data(ModelTests.config.utf8), modelType: "qwen3")
        #expect(model is any H2OModel)
        #expect(try model.newCache(parameters: nil).allSatisfy { $0 is H2OKVCache })
    }

    /// Later versions of mlx-swift-lm take none but their own windows with a capacity.
    @Test func capacitiesThatAreCheckedAreWindows() throws {
        struct Capacity {
            let maxTokens: Int
        }
        struct Configuration {
            let capacity: Capacity?
        }
        struct Later {
            var maxKVSize: Int?
            var kvCache: Configuration?
        }
        let typed = Configuration(capacity: Capacity(maxTokens: 30))
        let cases: [(Any, Int?)] = [
            (Later(), nil), (Later(maxKVSize: 20), 20), (Later(kvCache: typed), 30),
            (Later(kvCache: Configuration(capacity: nil)), nil),
            (GenerateParameters(maxKVSize: 20), nil),
        ]
        for (parameters, capacity) in cases {
            #expect(H2OConfiguration.capacity(reflecting: parameters) == capacity)
        }
        let windows = try H2OConfiguration.default.ownWindows([KVCacheSimple(), MambaCache()], 16)
        #expect(windows[0] is RotatingKVCache && windows[0].maxSize == 16)
        #expect(windows[1] is MambaCache)
    }
}

private struct Template: Tokenizer {
    struct Refusal: Error {}

    let refusesSystem: Bool
    var bosToken: String? { nil }
    var eosToken: String? { nil }
    var unknownToken: String? { nil }

    func encode(text: String, addSpecialTokens: Bool) -> [Int] { [] }
    func decode(tokenIds: [Int], skipSpecialTokens: Bool) -> String { "" }
    func convertTokenToId(_ token: String) -> Int? { nil }
    func convertIdToToken(_ id: Int) -> String? { nil }

    func applyChatTemplate(
        messages: [[String: any Sendable]], tools: [[String: any Sendable]]?,
        additionalContext: [String: any Sendable]?
    ) throws -> [Int] {
        if refusesSystem && messages.contains(where: { $0["role"] as? String == "system" }) {
            throw Refusal()
        }
        return [1]
    }
}
