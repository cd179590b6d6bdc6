import Foundation
import MLX
import MLXLLM
import MLXLMCommon
import MLXNN
import Testing

@testable import MLXH2O

/// Whole models: stock ones unmodified, and those that this package registers.
@Suite(.serialized) struct ModelTests {
    static let config = """
        {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 96,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 128,
         "rms_norm_eps": 1e-6, "tie_word_embeddings": true}
        """

    static func stock() throws -> Qwen3Model {
        try drawn {
            Qwen3Model(try JSONDecoder().decode(Qwen3Configuration.self, from: Data(config.utf8)))
        }
    }

    static func own(_ type: String = "qwen3") throws -> H2OTransformer {
        let text = config.replacingOccurrences(of: "qwen3", with: type)
        return try drawn {
            try H2OTransformer(
                configurationData: Data(text.utf8), h2o: H2OConfiguration(budget: .tokens(40)))
        }
    }

    /// A model with random weights of its own: the global random state is shared by all suites, which
    /// run at the same time.
    static func drawn<M: Module>(_ model: () throws -> M) throws -> M {
        try withRandomState(MLXRandom.RandomState(seed: 7)) {
            let model = try model()
            eval(model)
            return model
        }
    }

    static func generated(
        _ model: any LanguageModel, _ caches: [any KVCache]?, prompt: Int = 30, tokens: Int = 60
    ) throws -> [Int] {
        let input = LMInput(tokens: MLXArray((0 ..< Int32(prompt)).map { $0 * 37 % 128 }))
        let iterator = try TokenIterator(
            input: input, model: model, cache: caches,
            parameters: GenerateParameters(maxTokens: tokens, temperature: 0, prefillStepSize: 16))
        return Array(iterator)
    }

    @Test func stockModelGeneratesTheSameUnderBudget() throws {
        let model = try Self.stock()
        let caches = try H2OConfiguration(budget: .tokens(128)).caches(for: model)
        #expect(try Self.generated(model, caches) == Self.generated(model, nil))
    }

    @Test func stockModelsAreBoundedByEveryPolicyOfKeys() throws {
        let model = try Self.stock()
        for policy in [
            H2OPolicies.Distinct.keysOnly, H2OPolicies.KeyDiff(), H2OPolicies.Streaming(),
        ]
            as [any H2OPolicy]
        {
            for remainder in [true, false] {
                let configuration = try H2OConfiguration(
                    budget: .tokens(40), policy: policy, remainder: remainder)
                let caches = try configuration.caches(for: model)
                #expect(try Self.generated(model, caches).count == 60)
                for cache in caches.map({ $0 as! H2OKVCache }) {
                    #expect(!cache.attends)
                    #expect(cache.physicalLength <= 40 && cache.evicted > 0)
                    // The iterator computes one token ahead.
                    #expect(90 ... 91 ~= cache.offset)
                }
            }
        }
    }

    /// As a chat does it: one list of caches, and an iterator over the new message for every turn.
    @Test func conversationsGoOnInTheSameMemory() throws {
        let stock = try Self.stock(), own = try Self.own()
        try own.update(parameters: stock.parameters(), verify: .all)
        for (model, policy) in [
            (stock, nil), (own, H2OPolicies.Distinct()), (own, H2OPolicies.H2O()),
        ]
            as [(any LanguageModel, (any H2OPolicy)?)]
        {
            func answers(
                _ caches: [any KVCache], after: () throws -> Void = {}
            ) throws -> [[Int]] {
                try (0 ..< 5).map { turn in
                    let said = try Self.generated(model, caches, prompt: 20 + turn, tokens: 8)
                    try after()
                    return said
                }
            }
            let plain = (0 ..< 3).map { _ in KVCacheSimple() }
            let wide = try H2OConfiguration(budget: .tokens(400), policy: policy)
            let expected = try answers(plain)
            #expect(try answers(wide.caches(for: model)) == expected)
            let caches = try H2OConfiguration(budget: .tokens(48), policy: policy)
                .caches(for: model).map { $0 as! H2OKVCache }
            var said = 0, turn = 0
            let actual = try answers(caches) {
                said += 20 + turn + 8
                turn += 1
                for cache in caches {
                    #expect(cache.offset == said && cache.physicalLength <= 48)
                    let kept = try cache.keptPositions()[0].map { Float($0.count) }
                    let folded = try cache.evictedRemainder!.count.asArray(Float.self)
                    #expect(zip(kept, folded).allSatisfy { $0 + $1 == Float(said) })
                }
            }
            #expect(actual.allSatisfy { $0.count == 8 } && actual[0] == expected[0])
        }
    }

    @Test func stockModelsRefusePoliciesThatNeedAttention() throws {
        let model = try Self.stock()
        #expect(throws: H2OError.policyNeedsAttention(policy: "h2o", model: "Qwen3Model")) {
            try H2OConfiguration.h2o.caches(for: model)
        }
        let message = H2OError.policyNeedsAttention(policy: "h2o", model: "Qwen3Model")
            .localizedDescription
        #expect(
            message.contains("H2OModels.register()") && message.contains("H2OPolicies.KeyDiff()"))
        #expect(throws: H2OError.self) {
            try H2OConfiguration(budget: .tokens(40), packing: H2OPacking(keyBits: 8))
                .caches(for: model)
        }
    }

    /// What is asked for too late to throw stops with the same words.
    @Test func attendingCachesStopInStockModels() async {
        await #expect(processExitsWith: .failure) {
            let cache = try H2OKVCache([40, 40], policy: H2OPolicies.H2O())
            let rows = MLXArray.zeros([1, 2, 1, 32], dtype: .float32)
            _ = cache.update(keys: rows, values: rows)
        }
    }

    @Test func ownModelIsTheStockModel() throws {
        let stock = try Self.stock(), own = try Self.own()
        try own.update(parameters: stock.parameters(), verify: .all)
        let tokens = MLXArray((0 ..< Int32(20)).map { $0 * 11 % 128 }, [1, 20])
        let caches = try stock.newCache(parameters: nil)
        let expected = stock(tokens, cache: caches)
        #expect(same(own(tokens, cache: own.plainCaches()), expected))
        #expect(
            try Self.generated(own, own.plainCaches()) == Self.generated(stock, nil))
    }

    @Test func ownModelsRunEveryPolicyAndRagged() throws {
        let names = H2OPolicies.names.filter { $0 != "newest" }
        for type in H2OModels.modelTypes {
            let model = try Self.own(type)
            eval(model)
            for name in sampled(names, step: 4) {
                let recent: [String: H2OSettingValue] = name == "paper" ? ["recent": .int(8)] : [:]
                let policy = try H2OPolicies.make(name, settings: recent)
                let configuration = try H2OConfiguration(budget: .tokens(40), policy: policy)
                let caches = try configuration.caches(for: model)
                #expect(try Self.generated(model, caches, tokens: 20).count == 20)
                #expect(caches.allSatisfy { ($0 as! H2OKVCache).attends })
            }
            #expect(try model.newCache(parameters: nil).allSatisfy { $0 is H2OKVCache })
        }
    }

    @Test func registeredModelsReplaceTheStockOnes() async throws {
        await H2OModels.register(try H2OConfiguration(budget: .tokens(40)))
        let model = try await LLMTypeRegistry.shared.createModel(
            configuration: Data(Self.config.utf8), modelType: "qwen3")
        #expect(model is any H2OModel)
        let caches = try model.newCache(parameters: nil).map { $0 as! H2OKVCache }
        #expect(caches.count == 3 && caches.allSatisfy { $0.attends })
        let smaller = try model.newCache(parameters: GenerateParameters(maxKVSize: 30))
        #expect((smaller[0] as! H2OKVCache).maxSize! < caches[0].maxSize!)
    }

    @Test func profilesShareSlotsOut() throws {
        let folder = GoldenReplay.embeddedModel
        let profile = try H2OProfile(contentsOf: folder.appendingPathComponent(H2OProfile.fileName))
        let configuration = try H2OConfiguration(
            budget: .tokens(96), headBudgets: .profile(profile))
        let model = try H2OModels.load(
            folder: folder, dtype: .float32, configuration: configuration)
        let budgets = try configuration.caches(for: model).map {
            ($0 as! H2OKVCache).settings.filling.last!.budgets
        }
        // As Python shares them out (tests/budgets/test_profile.py).
        #expect(budgets == [[10, 10], [32, 32], [48, 32], [32, 556]])
        #expect(throws: H2OError.self) { try configuration.caches(for: try Self.own()) }
        let matching = try H2OConfiguration(
            budget: .tokens(96), headBudgets: .matching([profile]))
        let uniform = try matching.caches(for: try Self.own()).map { ($0 as! H2OKVCache).budgets! }
        #expect(uniform.allSatisfy { $0[0] == $0[1] })
    }

    @Test func bytesChooseSlotsAndBits() throws {
        let folder = GoldenReplay.embeddedModel
        let profile = try H2OProfile(contentsOf: folder.appendingPathComponent(H2OProfile.fileName))
        func caches(_ part: Double, _ policy: (any H2OPolicy)? = nil) throws -> [H2OKVCache] {
            let configuration = try H2OConfiguration(
                budget: .share(part), policy: policy, headBudgets: .profile(profile))
            let model = try H2OModels.load(
                folder: folder, dtype: .float32, configuration: configuration)
            return try configuration.caches(for: model).map { $0 as! H2OKVCache }
        }
        func last(_ caches: [H2OKVCache]) -> [[Int]] {
            caches.map { $0.settings.filling.last!.budgets }
        }
        // As Python's caches of so many bytes begin, and end up (tests/budgets/test_profile.py).
        let whole = try caches(1), half = try caches(0.5)
        let quarter = try caches(0.25), tenth = try caches(0.1)
        #expect(whole.allSatisfy { $0.packing.keyBits == 8 && $0.frame != nil })
        #expect(whole.allSatisfy { $0.budgets == [3486, 3486] })
        #expect(last(whole) == [[6880, 3440], [430, 860], [860, 1290], [6880, 6880]])
        // More slots in 6 bits are not worth what those lose more.
        #expect(half.allSatisfy { $0.packing.keyBits == 8 && $0.frame != nil })
        #expect(last(half) == [[3433, 1716], [214, 429], [429, 643], [3432, 3432]])
        #expect(quarter.allSatisfy { $0.packing.keyBits == 6 && $0.frame != nil })
        #expect(quarter.allSatisfy { $0.budgets == [1099, 1099] })
        #expect(last(quarter) == [[2163, 1081], [135, 270], [270, 405], [2162, 2162]])
        #expect(tenth.allSatisfy { $0.packing.keyBits == 6 && $0.frame != nil })
        #expect(tenth.allSatisfy { $0.budgets == [433, 433] })
        #expect(last(tenth) == [[176, 768], [64, 96], [96, 64], [96, 2048]])
        // Keys that have no frame stay dense.
        let unframed = try H2OPacking(valueBits: 6)
        #expect(try caches(0.25, H2OPolicies.Distinct()).allSatisfy { $0.packing == unframed })
        for part in [0, -1, .nan, .infinity, 17] {
            #expect(throws: H2OError.self) { try H2OConfiguration(budget: .share(part)) }
        }
    }

    @Test func layersThatCannotBeBoundedAreTold() throws {
        let model = Mixed(try Self.stock())
        #expect(throws: H2OError.self) {
            try H2OConfiguration.default.caches(for: model)
        }
        let partial = try H2OConfiguration(
            budget: .tokens(40), compatibility: .allowPartial)
        let caches = try partial.caches(for: model)
        #expect(caches.map { $0 is H2OKVCache } == [true, false, true])
        #expect(H2OKVCache.describe(caches).map(\.isBounded) == [true, false, true])
    }
}

/// A stock model one of whose layers has a cache of its own kind.
private final class Mixed: Module, LLMModel {
    let inner: Qwen3Model

    init(_ inner: Qwen3Model) { self.inner = inner }

    var loraLayers: [Module] { [] }

    func callAsFunction(_ inputs: MLXArray, cache: [any KVCache]?) -> MLXArray {
        inner(inputs, cache: cache)
    }

    func newCache(parameters: GenerateParameters?) -> [any KVCache] {
        [KVCacheSimple(), OwnCache(), KVCacheSimple()]
    }
}

private final class OwnCache: KVCache {
    private let plain = KVCacheSimple()
    var offset: Int { plain.offset }
    let maxSize: Int? = nil
    var state: [MLXArray] = []
    var metaState: [String] = []
    let isTrimmable = false

    func innerState() -> [MLXArray] { plain.innerState() }
    func trim(_ n: Int) -> Int { 0 }
    func copy() -> any KVCache { OwnCache() }

    func update(keys: MLXArray, values: MLXArray) -> (MLXArray, MLXArray) {
        plain.update(keys: keys, values: values)
    }

    func makeMask(
        n: Int, windowSize: Int?, returnArray: Bool
    ) -> MLXFast.ScaledDotProductAttentionMaskMode {
        plain.makeMask(n: n, windowSize: windowSize, returnArray: returnArray)
    }
}
