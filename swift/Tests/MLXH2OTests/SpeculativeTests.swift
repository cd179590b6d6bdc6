import Foundation
import MLX
import MLXLMCommon
import Testing

@testable import MLXH2O

/// Drafts checked and taken back as mlx-swift-lm's `SpeculativeTokenIterator` does it.
@Suite(.serialized) struct SpeculativeTests {
    private static let undo = 5, drafted = 4

    private func model() throws -> H2OTransformer {
        // With a head of its own it says more than what it heard last.
        let config = ModelTests.config.replacingOccurrences(of: "true", with: "false")
            .replacingOccurrences(of: "layers\": 3", with: "layers\": 2")
        return try ModelTests.drawn {
            try H2OTransformer(
                configurationData: Data(config.utf8), h2o: H2OConfiguration(budget: .tokens(40)))
        }
    }

    private let prompt = (0 ..< 30).map { $0 * 37 % 128 }

    private func greedy(_ logits: MLXArray) -> [Int] {
        argMax(logits[0], axis: -1).asArray(Int.self)
    }

    private func step(
        _ model: H2OTransformer, _ tokens: [Int], _ caches: [any KVCache]
    ) -> MLXArray {
        model(MLXArray(tokens.map { Int32($0) })[.newAxis], cache: caches)
    }

    /// Tokens one by one, the prompt but its last token read before.
    private func plain(_ model: H2OTransformer, _ caches: [any KVCache], _ count: Int) -> [Int] {
        eval(step(model, Array(prompt.dropLast()), caches))
        var tokens = [prompt.last!]
        for _ in 0 ..< count { tokens.append(greedy(step(model, [tokens.last!], caches)).last!) }
        return Array(tokens.dropFirst())
    }

    /// The same by rounds: draft, check all at once, take back what was wrong. `first` tokens of the
    /// prompt are read before.
    private func speculative(
        _ model: H2OTransformer, _ caches: [any KVCache], _ count: Int, first: Int,
        right: (Int) -> Bool
    ) -> (tokens: [Int], rejected: Int) {
        eval(step(model, Array(prompt[..<first]), caches))
        // What plain decoding says, for drafts that are right now and then.
        let oracle = model.plainCaches()
        var said: [Int] = [], rejected = 0, y = Array(prompt[first...]), unread = prompt
        while said.count < count {
            var drafts: [Int] = []
            for i in 0 ..< Self.drafted {
                let next = greedy(step(model, drafts.isEmpty ? unread : [drafts.last!], oracle))
                drafts.append(right(said.count + i) ? next.last! : (next.last! + 1) % 128)
            }
            let checked = greedy(step(model, y + drafts, caches)).suffix(Self.drafted + 1)
            let accepted = zip(checked, drafts).prefix { $0 == $1 }.count
            let new = Array(checked.prefix(accepted + 1))
            said += new
            rejected += Self.drafted - accepted
            trimPromptCache(caches, numTokens: Self.drafted - accepted)
            oracle.forEach { $0.trim(Self.drafted - 1 - min(accepted, Self.drafted - 1)) }
            y = [new.last!]
            unread = accepted == Self.drafted ? [drafts.last!, new.last!] : y
        }
        return (Array(said[..<count]), rejected)
    }

    @Test func tokensArePlainDecodings() throws {
        let model = try model()
        for policy in [
            H2OPolicies.Distinct(), H2OPolicies.H2O(), H2OPolicies.EMA(), H2OPolicies.TOVA(),
            H2OPolicies.Streaming(), H2OPolicies.KeyDiff(),
        ] as [any H2OPolicy] {
            for (name, packing) in CacheTests.stores
            where name == "dense" || policy is H2OPolicies.Distinct || policy is H2OPolicies.H2O {
                let configuration = try H2OConfiguration(
                    budget: .tokens(28), policy: policy, packing: packing, undo: Self.undo)
                let label = "\(policy.name) \(name)"
                let expected = plain(model, try configuration.caches(for: model), 16)
                let caches = try configuration.caches(for: model)
                let run = speculative(model, caches, 16, first: prompt.count - 1) {
                    $0 % 3 != 1
                }
                #expect(run.tokens == expected, "\(label)")
                #expect(run.rejected > 5 && Set(expected).count > 1, "\(label) \(expected)")
                #expect(caches.allSatisfy { ($0 as! H2OKVCache).evicted > 0 })
            }
        }
    }

    /// As upstream begins it: what is left of a prompt, over budget, and the draft are one chunk.
    @Test func aPromptAndItsDraftAreOneChunk() throws {
        let model = try model()
        let configuration = try H2OConfiguration(
            budget: .tokens(20), policy: H2OPolicies.H2O(), undo: Self.undo)
        let caches = try configuration.caches(for: model).map { $0 as! H2OKVCache }
        let run = speculative(model, caches, 6, first: 10) { _ in false }
        #expect(run.rejected == 6 * Self.drafted)
        #expect(caches.allSatisfy { $0.offset == prompt.count + 5 && $0.failure == nil })
        #expect(try caches.flatMap { try $0.keptPositions()[0] }.allSatisfy { $0.last! == 34 })
    }

    /// Of a draft longer than what can be taken back a part stays, which the cache says.
    @Test func longerDraftsThanCanBeTakenBackAreTold() throws {
        let cache = try H2OKVCache([20, 20], undo: 2)
        let rows = RowStream(tokens: 60)
        rows.run(cache, [30] + ones(9))
        #expect(trimPromptCache([cache], numTokens: 3) == 2 && cache.offset == 37)
        rows.run(cache, [1])
        #expect(cache.failure != nil && cache.offset == 38)
    }
}
