import Foundation
import MLX
import MLXLMCommon
import Testing

@testable import MLXH2O

/// What a prompt takes of memory while it is read, by caches that are handed in.
@Suite(.serialized) struct PrefillMemoryTests {
    #if os(macOS) || os(Linux)  // where exit tests exist
        /// In a process of its own: what tests beside it hold would count.
        @Test func handedInCachesTakeNoMoreThanTheModelsOwn() async {
            await #expect(processExitsWith: .success) { try comparePrefills() }
        }
    #endif
}

private func comparePrefills() throws {
    let stock = try ModelTests.stock(), own = try ModelTests.own()
    eval(own)
    func peak(_ model: any LanguageModel, _ caches: [any KVCache]?, _ tokens: Int) throws -> Int {
        let prompt = MLXArray((0 ..< Int32(tokens)).map { $0 * 37 % 128 })
        eval(prompt)
        Memory.peakMemory = 0
        let before = Memory.activeMemory
        var iterator = try TokenIterator(
            input: LMInput(tokens: prompt), model: model, cache: caches,
            parameters: GenerateParameters(maxTokens: 1, temperature: 0, prefillStepSize: 256))
        _ = iterator.next()
        return Memory.peakMemory - before
    }
    let (short, long) = (2048, 4096)
    let plain = try peak(stock, nil, long)
    let packing = try H2OPacking(keyBits: 8, valueBits: 8, groupSize: 32)
    let budget = H2OConfiguration.Budget.tokens(256)
    for (model, configuration) in [
        (stock, try H2OConfiguration(budget: budget)),
        (own, try H2OConfiguration(budget: budget)),
        (own, try H2OConfiguration(budget: budget, policy: H2OPolicies.H2O.paper)),
        (own, try H2OConfiguration(budget: budget, packing: packing)),
    ] as [(any LanguageModel, H2OConfiguration)] {
        let some = try peak(model, configuration.caches(for: model), short)
        let all = try peak(model, configuration.caches(for: model), long)
        print("\(type(of: model)): \(some) and \(all) bytes, the model's own caches \(plain)")
        precondition(all <= plain, "\(all) bytes where the model's own caches take \(plain)")
        // Chunk after chunk in the same memory: what is evaluated after each leaves no graph behind.
        precondition(
            Double(all) < 1.1 * Double(some), "\(all) bytes for twice the tokens of \(some)")
    }
}
