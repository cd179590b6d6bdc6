import MLX
import MLXLMCommon
import Testing

@testable import MLXH2O

/// How far answers lean on evicted tokens. (The golden conversations compare the numbers.)
@Suite(.serialized) struct UnreadTests {
    private func numbers(_ told: MLXArray?) -> [Float] { told?.asArray(Float.self) ?? [] }

    @Test func theMeanIsOverTheAnswersTokens() throws {
        let stream = RowStream(tokens: 120)
        for name in ["salient", "streaming"] {
            let cache = try H2OKVCache(.heads([24, 30]), policy: H2OPolicies.make(name))
            #expect(try cache.unread == nil && cache.unreadMean == nil)
            stream.run(cache, [10] + ones(2))
            #expect(try numbers(cache.unread) == [0, 0])
            stream.run(cache, [40])
            var told = [numbers(try cache.unread)]
            for _ in 0 ..< 30 {
                stream.run(cache, ones(1))
                told.append(numbers(try cache.unread))
                let mean = numbers(try cache.unreadMean)
                for head in 0 ..< 2 {
                    let expected = told.map { $0[head] }.reduce(0, +) / Float(told.count)
                    #expect(expected > 0 && abs(mean[head] - expected) < 1e-5, "\(name)")
                }
            }
            let all = try H2OKVCache.unread(of: [cache, KVCacheSimple()])
            let mean = numbers(try cache.unreadMean).reduce(0, +) / 2
            #expect(abs(all! - mean) < 1e-6)
            try cache.newTurn(carry: 1)
            #expect(try cache.unreadMean == nil)
        }
    }

    @Test func tokensThatAreTakenBackCountNoMore() throws {
        let stream = RowStream(tokens: 120)
        let cache = try H2OKVCache(.heads([24, 24]), policy: H2OPolicies.make("salient"), undo: 4)
        stream.run(cache, [40] + ones(25))
        let before = try (numbers(cache.unread), numbers(cache.unreadMean))
        stream.run(cache, [3])
        #expect(try numbers(cache.unread) != before.0)
        cache.trim(3)
        #expect(try numbers(cache.unread) == before.0)
        for (a, b) in zip(try numbers(cache.unreadMean), before.1) { #expect(abs(a - b) < 1e-6) }
    }

    @Test func whereItIsNotKnownNothingIsTold() throws {
        let stream = RowStream(tokens: 60)
        let silent = try H2OKVCache(
            .heads([24, 24]), policy: H2OPolicies.make("salient"), remainder: false)
        stream.run(silent, [40, 1])
        #expect(try silent.unread == nil && silent.evicted > 0)
        let plain = try H2OKVCache(
            .heads([24, 24]), policy: H2OPolicies.make("streaming"), attends: false)
        stream.run(plain, [40, 1])
        #expect(try plain.unread == nil && H2OKVCache.unread(of: [plain]) == nil)
    }
}
