import Foundation
import MLX
import MLXLMCommon
import Testing

@testable import MLXH2O

/// What a configuration could not have is told by the caches, and in the log.
@Suite(.serialized) struct NoticeTests {
    private func subjects(_ caches: [any KVCache]) -> [H2ONotice.Subject] {
        for notice in caches.notices {
            #expect(H2ONotice.all.filter { $0 == notice }.count == 1, "logged once: \(notice)")
        }
        return caches.notices.map(\.subject)
    }

    private func profile() throws -> H2OProfile {
        try H2OProfile(
            contentsOf: GoldenReplay.embeddedModel.appendingPathComponent(H2OProfile.fileName))
    }

    @Test func whatIsAsAskedForTellsNothing() throws {
        let model = try ModelTests.own()
        for policy in [nil, H2OPolicies.H2O()] as [(any H2OPolicy)?] {
            let configuration = try H2OConfiguration(
                budget: .tokens(40), policy: policy, pins: .positions([0 ..< 4]))
            #expect(try configuration.caches(for: model).notices.isEmpty)
        }
        let stock = try H2OConfiguration(budget: .tokens(40), policy: H2OPolicies.Streaming())
        #expect(try stock.caches(for: ModelTests.stock()).notices.isEmpty)
    }

    @Test func aPolicyOfKeysInThePlaceOfTheUsualOne() throws {
        let caches = try H2OConfiguration(budget: .tokens(40)).caches(for: ModelTests.stock())
        #expect(subjects(caches) == [.policy])
        let message = try #require(caches.notices.first).message
        #expect(message.contains("Qwen3Model") && message.contains("\"distinct\""), "\(message)")
        let copy = try #require(caches[0].copy() as? H2OKVCache)
        #expect(copy.notices == caches.notices)
    }

    @Test func headBudgetsThatAreUniform() throws {
        let matching = try H2OConfiguration(
            budget: .tokens(40), policy: H2OPolicies.Distinct.keysOnly,
            headBudgets: .matching([profile()]))
        #expect(try subjects(matching.caches(for: ModelTests.stock())) == [.headBudgets])
        #expect(try subjects(matching.caches(for: ModelTests.own())) == [.headBudgets])
    }

    @Test func instructionsThatAreNotKnown() throws {
        let configuration = try H2OConfiguration(budget: .tokens(40), pins: .instructions)
        #expect(try subjects(configuration.caches(for: ModelTests.own())) == [.pins])
    }

    @Test func positionsThatAreGone() throws {
        let cache = try H2OKVCache([20, 20], policy: H2OPolicies.Streaming())
        RowStream(tokens: 60).run(cache, [40])
        try cache.pin([38 ..< 40])
        #expect(cache.notices.isEmpty)
        #expect(try cache.pin([8 ..< 12]).gone == [8 ..< 12])
        #expect(subjects([cache]) == [.pins])
    }

    /// Of a registered model, which can refuse nothing.
    @Test func whatARegisteredModelDoesWithout() throws {
        func made(
            _ change: (inout H2OConfiguration) throws -> Void, maxKVSize: Int? = nil
        ) throws -> [any KVCache] {
            var configuration = try H2OConfiguration(budget: .tokens(40))
            try change(&configuration)
            let model = try H2OTransformer(
                configurationData: Data(ModelTests.config.utf8), h2o: configuration)
            return model.newCache(
                parameters: maxKVSize.map { GenerateParameters(maxKVSize: $0) })
        }
        #expect(try subjects(made { _ in }) == [])
        let other = try profile()
        #expect(try subjects(made { $0.headBudgets = .profile(other) }) == [.headBudgets])
        #expect(try subjects(made({ _ in }, maxKVSize: 4)) == [.budget])
        let wide = try made { $0.packing = try H2OPacking(keyBits: 8, groupSize: 128) }
        #expect(subjects(wide) == [.packing])
        #expect(wide.allSatisfy { ($0 as? H2OKVCache)?.packing.packs == false })
        // The usual groups give way to those that fit.
        let usual = try made { $0.packing = try H2OPacking(keyBits: 8) }
        #expect(subjects(usual) == [])
        #expect(usual.allSatisfy { ($0 as? H2OKVCache)?.packing.groupSize == 32 })
        // No bound at all: each layer says so.
        #expect(try subjects(made { $0.saturation = -1 }) == [.layer, .layer, .layer])
    }

    /// Before the first token, and not with it.
    @Test func widthsThatCannotBePackedAreAnError() throws {
        let configuration = try H2OConfiguration(
            budget: .tokens(40), packing: H2OPacking(keyBits: 8, groupSize: 128))
        #expect(throws: H2OError.self) { try configuration.caches(for: ModelTests.own()) }
    }
}
