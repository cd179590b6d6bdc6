import Foundation
import MLX
import MLXLMCommon
import Testing

@testable import MLXH2O

/// Pinned tokens stay, and turns count as much of the past as is asked for.
@Suite(.serialized) struct PinTests {
    private func cache(
        _ policy: any H2OPolicy, _ sink: Int, budgets: [Int] = [24, 32], attends: Bool = true
    ) throws -> H2OKVCache {
        try H2OKVCache(
            budgets, policy: policy.with { ($0.sink, $0.recent) = (sink, .count(6)) },
            attends: attends)
    }

    /// Whether every head holds the tokens at these positions.
    private func holds(_ cache: H2OKVCache, _ spans: [Range<Int>]) throws -> Bool {
        try cache.keptPositions()[0].allSatisfy { Set(spans.joined()).isSubset(of: $0) }
    }

    @Test func pinnedFirstTokensAreWhatSinksAre() throws {
        let stream = RowStream(tokens: 120)
        for name in H2OPolicies.names where name != "paper" {
            let policy = try H2OPolicies.make(name)
            let pinned = try cache(policy, 0), sinks = try cache(policy, 5)
            try pinned.pin([0 ..< 5])
            let outputs = [pinned, sinks].map { stream.run($0, [40] + ones(30) + [20]) }
            #expect(try pinned.keptPositions() == sinks.keptPositions(), "\(name)")
            #expect(allClose(outputs[0], outputs[1], atol: 1e-5).item(Bool.self), "\(name)")
        }
    }

    @Test func pinnedAfterwardsAndThroughFilesAndResizing() throws {
        let stream = RowStream(tokens: 200), url = temporaryFile()
        defer { try? FileManager.default.removeItem(at: url) }
        let cache = try cache(H2OPolicies.Salient(), 2)
        stream.run(cache, [40] + ones(10))
        let heads = try cache.keptPositions()[0].map { Set($0) }
        let gone = (4 ..< 40).filter { p in heads.allSatisfy { !$0.contains(p) } }.prefix(2)
        let answer = try cache.pin(gone.map { $0 ..< $0 + 1 } + [46 ..< 50, 60 ..< 62])
        #expect(answer.gone.flatMap { Array($0) } == Array(gone) && !answer.isComplete)
        let pins = [46 ..< 50, 60 ..< 62]
        #expect(cache.pins == pins)
        stream.run(cache, ones(20))
        try cache.newTurn(carry: 0.5)
        try H2OKVCache.saveCaches([cache], to: url)
        let (loaded, _) = try H2OKVCache.loadedCaches(from: url)
        let twin = loaded[0] as! H2OKVCache, other = cache.copy() as! H2OKVCache
        let expected = stream.run(cache, ones(30) + [25])
        for same in [twin, other] {
            #expect(same.pins == pins)
            let output = stream.run(same, ones(30) + [25])
            #expect(allClose(output, expected, atol: 1e-5).item(Bool.self))
            #expect(try holds(same, pins) && same.keptPositions() == cache.keptPositions())
        }
        try cache.resize([18, 18])
        stream.run(cache, ones(20))
        #expect(try holds(cache, pins))
        try cache.unpin()
        stream.run(cache, ones(30))
        #expect(try !holds(cache, pins))
    }

    @Test func smallHeadsGetSlotsOfLargeOnes() throws {
        let stream = RowStream(tokens: 200), pins = [0 ..< 9, 30 ..< 36]
        for pinnedFirst in [true, false] {
            let cache = try cache(H2OPolicies.H2O(), 2, budgets: [12, 60])
            if pinnedFirst { try cache.pin(pins) }
            stream.run(cache, [9])
            if !pinnedFirst { try cache.pin(pins) }
            stream.run(cache, [40] + ones(40))
            #expect(try holds(cache, pins) && cache.budgets == [22, 50])
            #expect(throws: H2OError.self) { try cache.pin([100 ..< 140]) }
            #expect(cache.pins == pins)
        }
        let stock = try cache(H2OPolicies.KeyDiff(), 2, budgets: [40, 40], attends: false)
        try stock.pin([3 ..< 20])
        for first in stride(from: 0, to: 120, by: 20) {
            let range = first ..< first + 20
            _ = stock.update(
                keys: stream.keys[0..., 0..., range], values: stream.values[0..., 0..., range])
        }
        #expect(try holds(stock, [3 ..< 20]))
        #expect(throws: H2OError.self) { try stock.pin([200 ..< 230]) }
        #expect(throws: H2OError.self) { try stock.pin([-1 ..< 5]) }
    }

    @Test func aResetMakesAllTokensAlike() throws {
        let stream = RowStream(tokens: 120), cache = try cache(H2OPolicies.Salient(), 2)
        stream.run(cache, [40] + ones(20))
        try cache.newTurn(carry: 0)
        #expect(try Set(cache.keptScores().joined().joined()) == [0])
        #expect(cache.configuration["aged_from"]?.int == 59)
        stream.run(cache, ones(10))
        #expect(try cache.keptScores().joined().joined().allSatisfy { $0 >= 0 && $0 <= 10.1 })
        #expect(throws: H2OError.self) { try cache.newTurn(carry: 1.5) }
    }
}
