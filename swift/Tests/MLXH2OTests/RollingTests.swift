import Foundation
import MLX
import MLXLMCommon
import Testing

@testable import MLXH2O

/// Positions without gaps. (Golden vectors hold every policy to Python's outputs.)
@Suite(.serialized) struct RollingTests {
    private static let sinks = 2, slots = 20
    private let policy = H2OPolicies.Streaming().with { $0.sink = sinks }

    /// Against keys that get their RoPE only now, at 0, 1, 2, ...: the first tokens and the newest.
    @Test func keptTokensAreSeenAtNeighbouringPositions() throws {
        let rope = try H2ORope(dimensions: 16, base: 500, scale: 0.5, traditional: true)
        let bare = RowStream(heads: 2, tokens: 120, width: 32)
        func turned(_ rows: MLXArray, at offset: Int) -> MLXArray {
            MLXFast.RoPE(
                rows, dimensions: 16, traditional: true, base: 500, scale: 0.5, offset: offset)
        }
        for length in [1, 5] {
            let cache = try H2OKVCache(
                [Self.slots, Self.slots], policy: policy, remainder: false, rope: rope)
            for first in stride(from: 0, to: 100, by: length) {
                let new = first ..< first + length
                let keys = turned(bare.keys[0..., 0..., new], at: first)
                let values = bare.values[0..., 0..., new]
                // A single token takes the slot of the oldest that is no sink before it is attended to.
                let room = length == 1 ? Self.slots - 1 : Self.slots
                let newest = max(first - (room - Self.sinks), Self.sinks)
                let seen =
                    Array(0 ..< min(Self.sinks, first)) + Array(newest ..< max(first, newest))
                let out = cache.attend(
                    queries: turned(bare.queries[0..., 0..., new], at: first), keys: keys,
                    values: values, scale: 0.18, mask: length > 1 ? .causal : .none)
                let all = MLXArray((seen + new).map(Int32.init))
                let expected = MLXFast.scaledDotProductAttention(
                    queries: turned(bare.queries[0..., 0..., new], at: seen.count),
                    keys: turned(bare.keys[0..., 0..., all], at: 0),
                    values: bare.values[0..., 0..., all], scale: 0.18,
                    mask: length > 1 ? .causal : .none)
                #expect(
                    allClose(out, expected, rtol: 1e-3, atol: 1e-4).item(Bool.self), "\(first)")
            }
            #expect(cache.evicted >= 80 && cache.failure == nil)
        }
    }

    private static func rolling(
        _ rope: H2ORope? = nil, budget: H2OConfiguration.Budget = .tokens(40)
    ) throws -> H2OConfiguration {
        try H2OConfiguration(budget: budget, remainder: false, positions: .rolling(rope))
    }

    /// The model tells its RoPE, and its keys are looked at; size in bytes leaves rows unpacked.
    @Test func aModelsOwnRope() throws {
        let model = try H2OModels.load(folder: GoldenReplay.embeddedModel, dtype: .float32)
        for budget in [H2OConfiguration.Budget.tokens(40), .bytes(400_000)] {
            let caches = try Self.rolling(budget: budget).caches(for: model)
            _ = try ModelTests.generated(model, caches, prompt: 200, tokens: 20)
            let bounded = caches.compactMap { $0 as? H2OKVCache }
            #expect(bounded.count == caches.count && bounded.allSatisfy { $0.evicted > 0 })
            #expect(bounded.allSatisfy { $0.rope == model.plainRope && !$0.packing.packs })
            let description = H2OKVCache.describe(caches)[0].description
            #expect(description.contains("at positions without gaps"))
        }
        let wide = try H2OConfiguration(budget: .tokens(400), remainder: false).caches(for: model)
        let same = try Self.rolling(budget: .tokens(400)).caches(for: model)
        // Nothing changes while nothing is forgotten.
        #expect(
            try ModelTests.generated(model, same) == ModelTests.generated(model, wide))
    }

    @Test func otherRopesAreRefused() throws {
        let model = try H2OModels.load(folder: GoldenReplay.embeddedModel, dtype: .float32)
        let own = try #require(model.plainRope)
        let others = try [
            H2ORope(dimensions: own.dimensions, base: own.base * 3),
            H2ORope(dimensions: own.dimensions / 2, base: own.base),
            H2ORope(dimensions: own.dimensions * 2, base: own.base),
            H2ORope(dimensions: own.dimensions, base: own.base, traditional: !own.traditional),
            H2ORope(dimensions: own.dimensions, base: own.base, scale: 0.5),
        ]
        for other in others {
            let refused = #expect(throws: H2OError.self, "\(other)") {
                try Self.rolling(other).caches(for: model)
            }
            #expect(refused?.localizedDescription.contains("another one") == true)
        }
    }

    @Test func whatDoesNotGoWithThem() throws {
        #expect(throws: H2OError.self) { try H2ORope(dimensions: 7) }
        #expect(throws: H2OError.self) { try H2ORope(dimensions: 1 << 20) }
        #expect(throws: H2OError.self) { try H2ORope(dimensions: 8, base: 0) }
        #expect(throws: H2OError.self) { try H2ORope(dimensions: 8, scale: .infinity) }
        let rope = try H2ORope(dimensions: 8)
        #expect(throws: H2OError.self) {
            try H2OConfiguration(budget: .tokens(40), positions: .rolling(rope))
        }
        #expect(throws: H2OError.self) {
            try H2OConfiguration(
                budget: .tokens(40), remainder: false, packing: H2OPacking(valueBits: 8),
                positions: .rolling(rope))
        }
        #expect(throws: H2OError.self) { try H2OKVCache([40, 40], rope: rope) }
        let refused = #expect(throws: H2OError.self) {
            try H2OConfiguration(
                budget: .tokens(40), policy: H2OPolicies.KeyDiff(), remainder: false,
                positions: .rolling(rope)
            ).caches(for: ModelTests.stock())
        }
        #expect(refused?.localizedDescription.contains("attends by itself") == true)
    }

    /// A model that makes its caches by itself goes on at absolute positions, and says so.
    @Test func aModelGoesOnWithoutThem() throws {
        let text = ModelTests.config.replacingOccurrences(
            of: "\"vocab_size\"",
            with: "\"rope_scaling\": {\"type\": \"linear\", \"factor\": 2.0}, \"vocab_size\"")
        let model = try H2OTransformer(
            configurationData: Data(text.utf8), h2o: Self.rolling(budget: .tokens(40)))
        #expect(model.plainRope == nil)
        let caches = model.newCache(parameters: nil)
        #expect(caches.allSatisfy { ($0 as? H2OKVCache)?.rope == nil && $0 is H2OKVCache })
        #expect(caches.notices.map(\.subject) == [.positions])
    }

    /// As the iPhone guide has it: evicted rows come back to a long conversation.
    @Test func rowsComeBack() throws {
        let model = try H2OModels.load(folder: GoldenReplay.embeddedModel, dtype: .float32)
        let configuration = try H2OConfiguration(
            budget: .tokens(64), remainder: false, positions: .rolling(), spill: H2OSpill())
        let caches = try configuration.caches(for: model)
        _ = try ModelTests.generated(model, caches, prompt: 600, tokens: 70)
        let bounded = caches.compactMap { $0 as? H2OKVCache }
        #expect(bounded.allSatisfy { $0.spillFailure == nil && $0.failure == nil })
        #expect(bounded.reduce(0) { $0 + $1.rowsReturned } > 0)
    }

    @Test func aFileRemembersTheRope() throws {
        let file = temporaryFile()
        defer { try? FileManager.default.removeItem(at: file) }
        let model = try H2OModels.load(folder: GoldenReplay.embeddedModel, dtype: .float32)
        let caches = try Self.rolling().caches(for: model)
        _ = try ModelTests.generated(model, caches, prompt: 80, tokens: 10)
        try H2OKVCache.saveCaches(caches, to: file)
        let (loaded, _) = try H2OKVCache.loadCaches(from: file, for: model)
        #expect(loaded.allSatisfy { ($0 as? H2OKVCache)?.rope == model.plainRope })
        #expect(
            try ModelTests.generated(model, loaded, prompt: 9, tokens: 20)
                == ModelTests.generated(model, caches, prompt: 9, tokens: 20))
    }
}
