import Foundation
import MLX
import MLXLLM
import MLXLMCommon
import MLXNN
import Testing

@testable import MLXH2O

/// Models whose layers do not all have a plain KV cache.
@Suite(.serialized) struct CompositeCacheTests {
    private func generated(
        _ model: Hybrid, _ caches: [any KVCache]?, prompt: Int = 30, tokens: Int = 60
    ) throws -> [Int] {
        let input = LMInput(tokens: MLXArray((0 ..< Int32(prompt)).map { $0 * 37 % 128 }))
        return Array(
            try TokenIterator(
                input: input, model: model, cache: caches,
                parameters: GenerateParameters(maxTokens: tokens, temperature: 0)))
    }

    private func kinds(_ caches: [any KVCache]) -> [String] {
        placedMembers(of: caches).map { String(describing: type(of: $0.cache)) }
    }

    @Test func membersOfListsAreBounded() throws {
        let model = Hybrid { (0 ..< 3).map { _ in CacheList(MambaCache(), KVCacheSimple()) } }
        let wide = try H2OConfiguration(budget: .tokens(128)).caches(for: model)
        #expect(try generated(model, wide) == generated(model, nil))
        let caches = try H2OConfiguration(budget: .tokens(40)).caches(for: model)
        #expect(caches.allSatisfy { $0 is CacheList })
        #expect(
            kinds(caches)
                == Array(repeating: ["MambaCache", "H2OKVCache"], count: 3).flatMap { $0 })
        #expect(try generated(model, caches).count == 60)
        for list in caches.map({ $0 as! CacheList }) {
            let cache = list[1] as! H2OKVCache
            #expect(cache.physicalLength <= 40 && cache.evicted > 0)
            #expect(90 ... 91 ~= cache.offset)
            // What the layer keeps beside it is untouched.
            #expect((list[0] as! MambaCache)[0]?.shape == [1, 64])
        }
        let layers = H2OKVCache.describe(caches)
        #expect(layers.map(\.layer) == ["0.0", "0.1", "1.0", "1.1", "2.0", "2.1"])
        #expect(layers.map(\.isBounded) == [false, true, false, true, false, true])
        #expect(throws: H2OError.file("Cannot save a CacheList.")) {
            try H2OKVCache.saveCaches(caches, to: URL(fileURLWithPath: "/nowhere"))
        }
    }

    @Test func otherCachesStayAsTheyAre() throws {
        let bounded: [@Sendable () -> any KVCache] = [
            { KVCacheSimple() }, { RotatingKVCache(maxSize: 16) }, { MambaCache() },
            { CacheList(MambaCache(), RotatingKVCache(maxSize: 16)) },
            { CacheList(ArraysCache(size: 1), KVCacheSimple()) },
        ]
        let unbounded: [@Sendable () -> any KVCache] = [
            { QuantizedKVCache(groupSize: 32) }, { ChunkedKVCache() },
            { CacheList(MambaCache(), QuantizedKVCache(groupSize: 32)) },
        ]
        let all = try H2OConfiguration(budget: .tokens(40))
        let partial = try H2OConfiguration(budget: .tokens(40), compatibility: .allowPartial)
        let model = Hybrid { bounded.map { $0() } }
        for configuration in [all, partial] {
            let caches = try configuration.caches(for: model)
            #expect(
                kinds(caches) == [
                    "H2OKVCache", "RotatingKVCache", "MambaCache", "MambaCache", "RotatingKVCache",
                    "ArraysCache", "H2OKVCache",
                ])
            #expect(try generated(model, caches).count == 60)
            for (_, cache) in placedMembers(of: caches) {
                guard let cache = cache as? H2OKVCache else { continue }
                #expect(cache.physicalLength <= 40 && cache.evicted > 0)
                #expect(cache.remainderAnswers)
            }
        }
        for (i, made) in unbounded.enumerated() {
            let model = Hybrid { [KVCacheSimple(), made()] }
            let place = i == 2 ? "1.1" : "1", name = i == 1 ? "ChunkedKVCache" : "QuantizedKVCache"
            #expect(
                throws: H2OError.partial(
                    "Layer \(place) of Hybrid has a \(name), which cannot be bounded: pass "
                        + "compatibility: .allowPartial to leave it as it is.")
            ) { try all.caches(for: model) }
            let caches = try partial.caches(for: model)
            #expect(caches.notices.contains { $0.subject == .layer && $0.message.contains(name) })
            #expect(kinds(caches) == ["H2OKVCache"] + kinds([made()]))
            #expect(try generated(model, caches).count == 60)
            #expect((caches[0] as! H2OKVCache).physicalLength <= 40)
        }
    }

    /// A mask that weighs plain rows would not fit what the others hold.
    @Test func sharedMasksLeaveNoRoomForPlainRows() throws {
        let others: [@Sendable () -> any KVCache] = [
            { RotatingKVCache(maxSize: 16) }, { QuantizedKVCache(groupSize: 32) },
            { ChunkedKVCache(chunkSize: 16) },
        ]
        for (i, made) in others.enumerated() {
            let model = Hybrid { [KVCacheSimple(), made(), KVCacheSimple()] }
            model.sharesMasks = true
            if i != 1 {
                #expect(throws: H2OError.self) {
                    try H2OConfiguration(budget: .tokens(40)).caches(for: model)
                }
                let forgetful = try H2OConfiguration(budget: .tokens(40), remainder: false)
                #expect(try generated(model, forgetful.caches(for: model)).count == 60)
            }
            let partial = try H2OConfiguration(
                budget: .tokens(40), compatibility: .allowPartial)
            let caches = try partial.caches(for: model)
            #expect(H2OKVCache.describe(caches)[0].reason.hasSuffix("no remainder"))
            #expect(caches.notices.contains { $0.subject == .remainder })
            for turn in 1 ... 2 {
                #expect(try generated(model, caches).count == 60)
                for cache in caches.compactMap({ $0 as? H2OKVCache }) {
                    #expect(cache.physicalLength <= 40 && cache.offset == 90 * turn)
                }
            }
        }
    }

    @Test func modelsThatABoundedCacheCannotServeAreRefused() throws {
        let nothing = Hybrid { [RotatingKVCache(maxSize: 16), CacheList(MambaCache())] }
        let alone = Hybrid { [KVCacheSimple()] }
        alone.asksForMasks = false
        let sharing = Hybrid { [KVCacheSimple()] }
        sharing.readsRows = true
        for compatibility in [H2OConfiguration.Compatibility.requireAllLayers, .allowPartial] {
            let configuration = try H2OConfiguration(
                budget: .tokens(40), compatibility: compatibility)
            #expect(
                throws: H2OError.partial(
                    "Hybrid has no plain KV cache to bound: its own caches are all there is.")
            ) { try configuration.caches(for: nothing) }
            #expect(
                throws: H2OError.partial(
                    "Hybrid makes its masks without asking its caches, which a bounded cache "
                        + "cannot serve.")
            ) { try configuration.caches(for: alone) }
            #expect(
                throws: H2OError.partial(
                    "Hybrid reads the rows of its caches by itself, which a bounded cache cannot "
                        + "serve.")
            ) { try configuration.caches(for: sharing) }
        }
        // A model without a cache to bound is not even run.
        #expect(nothing.steps == 0)
    }
}

/// A stock model of attention layers that takes its caches as they come.
private final class Hybrid: Module, LLMModel {
    var asksForMasks = true
    var sharesMasks = false
    var readsRows = false
    private(set) var steps = 0
    private let makeCaches: () -> [any KVCache]
    private let rows = MLXRandom.normal([128, 64], key: MLXRandom.key(1))
    private let mix = MLXRandom.normal([64, 64], key: MLXRandom.key(2)) / 8

    init(_ makeCaches: @escaping () -> [any KVCache]) {
        self.makeCaches = makeCaches
        super.init()
    }

    func newCache(parameters: GenerateParameters?) -> [any KVCache] { makeCaches() }

    var loraLayers: [Module] { [] }

    func callAsFunction(_ inputs: MLXArray, cache: [any KVCache]?) -> MLXArray {
        steps += 1
        var hidden = rows[inputs]
        let shared = createAttentionMask(h: hidden, cache: sharesMasks ? cache![0] : nil)
        for cache in cache! {
            let list = cache as? CacheList
            for state in [cache, list?[0]].compactMap({ $0 as? ArraysCache }) {
                state[0] = hidden[0..., -1]
            }
            let attended = list == nil ? cache : list![1]
            if attended is ArraysCache { continue }
            let mask =
                sharesMasks
                ? shared : createAttentionMask(h: hidden, cache: asksForMasks ? attended : nil)
            let heads = hidden.reshaped([hidden.dim(0), hidden.dim(1), 2, 32])
                .transposed(0, 2, 1, 3)
            let output = attentionWithCacheUpdate(
                queries: heads, keys: heads, values: heads, cache: attended, scale: 0.2,
                mask: mask)
            if readsRows { _ = attended.state }
            let merged = output.transposed(0, 2, 1, 3).reshaped(hidden.shape)
            hidden = hidden + matmul(merged, mix)
        }
        return matmul(hidden, rows.transposed())
    }
}
