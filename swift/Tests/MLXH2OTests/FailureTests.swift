import MLX
import MLXLMCommon
import Testing

@testable import MLXH2O

/// What becomes of errors where mlx-swift-lm lets nothing be thrown.
@Suite(.serialized) struct FailureTests {
    private let rows = RowStream(tokens: 60)

    /// As much as can be goes; what stays is as if no more had been asked for.
    @Test func aVainTrimTakesWhatItCan() throws {
        for chunks in [[30] + ones(9), [5]] {
            let cache = try H2OKVCache([20, 20], undo: 3)
            let twin = try H2OKVCache([20, 20], undo: 3)
            for each in [cache, twin] { rows.run(each, chunks) }
            let possible = cache.undoableSteps
            #expect(twin.trim(possible) == possible && twin.failure == nil)
            #expect(cache.trim(possible + 2) == possible)
            #expect(cache.offset == twin.offset && cache.undoableSteps == twin.undoableSteps)
            if cache.offset == 0 { continue }  // there were no more, so nothing is lost
            guard case .state(let message) = cache.failure else {
                Issue.record("no failure")
                continue
            }
            #expect(message.contains("undo: 5"), "\(message)")
            #expect(H2ONotice.all.contains { $0.message.contains(message) })
            // The cache is right for what it holds.
            #expect(same(rows.run(cache, ones(6)), rows.run(twin, ones(6))))
            #expect(try cache.keptPositions() == twin.keptPositions())
            #expect(cache.failure == .state(message))
            cache.failure = nil
            #expect(cache.trim(2) == 2 && cache.failure == nil)
        }
    }

    /// MLX's way for what cannot throw: `withError` throws it, and the cache is as it was.
    @Test func aStepThatCannotBeIsThrownByWithError() throws {
        let cache = try H2OKVCache([20, 20]), twin = try H2OKVCache([20, 20])
        for each in [cache, twin] { rows.run(each, [30]) }
        let others = RowStream(kvHeads: 4, tokens: 60)
        var answer: MLXArray?
        #expect(throws: MLXError.self) { try withError { answer = others.run(cache, [1]) } }
        #expect(answer?.shape == [1, 4, 1, 32])
        guard case .state(let message) = cache.failure else {
            Issue.record("\(String(describing: cache.failure))")
            return
        }
        #expect(message.contains("another model's"), "\(message)")
        #expect(cache.offset == 30 && same(rows.run(cache, ones(3)), rows.run(twin, ones(3))))
        // Attending is not for stock models, and a stock cache has no attention.
        let keys = rows.keys[0..., 0..., 0 ..< 1]
        #expect(throws: MLXError.self) {
            try withError { _ = cache.update(keys: keys, values: keys) }
        }
        #expect(cache.failure == .policyNeedsAttention(policy: "salient", model: "this model"))
        #expect(throws: MLXError.self) {
            try withError { _ = cache.makeMask(n: 1, windowSize: 8, returnArray: true) }
        }
        let copy = try #require(cache.copy() as? H2OKVCache)
        #expect(copy.failure == cache.failure && copy.offset == 33)
    }

    /// As any operation of MLX that fails.
    @Test func outsideOfItTheProcessEnds() async {
        await #expect(processExitsWith: .failure) {
            let cache = try H2OKVCache([20, 20])
            RowStream(tokens: 60).run(cache, [30])
            RowStream(kvHeads: 4, tokens: 60).run(cache, [1])
        }
    }

    @Test func aStateThatIsNoneIsThrownByWithError() throws {
        let cache = try H2OKVCache([20, 20])
        rows.run(cache, [30])
        let settings = cache.metaState, state = cache.state
        #expect(throws: MLXError.self) {
            try withError {
                cache.state = Array(state.dropLast())
                cache.metaState = settings
            }
        }
        #expect(cache.failure != nil && cache.offset == 30)
        cache.state = state
        cache.metaState = settings
        #expect(cache.failure == nil && cache.offset == 30)
    }

    @Test func numbersThatAreNoneHaveAText() {
        let value = H2OSettingValue.array([.double(.nan), .double(-.infinity), .double(0.5)])
        #expect(value.text == #"["NaN","-Infinity",0.5]"#)
    }
}
