import Foundation
import MLX
import MLXH2O
import MLXLLM
import MLXLMCommon

/// A chat in bounded memory: one model, its caches, and what they hold.
public actor ChatEngine {
    /// What there is to see after some tokens.
    public struct Frame: Sendable {
        /// The text since the last frame.
        public let text: String
        /// The tokens of the whole conversation.
        public let tokens: Int
        /// Per token how many KV heads of all layers still hold it, as a share.
        public let held: [Double]
        /// Bytes of the caches.
        public let nbytes: Int
        /// Tokens generated per second so far.
        public let tokensPerSecond: Double
    }

    // Reading positions waits for the device, so not after every token.
    private static let tokensPerFrame = 8

    private let container: ModelContainer
    private let conversation = Conversation()

    /// Touched inside `container.perform` only, which runs one at a time.
    private final class Conversation: @unchecked Sendable {
        var caches: [any KVCache] = []
    }

    /// - Parameters:
    ///   - folder: Of a Llama, Mistral, Qwen2 or Qwen3 model.
    ///   - tokenizers: Loads its tokenizer.
    ///   - configuration: How its caches are bounded.
    public init(
        folder: URL, tokenizers: any TokenizerLoader, configuration: H2OConfiguration
    ) async throws {
        await H2OModels.register(configuration)
        container = try await LLMModelFactory.shared.loadContainer(
            from: folder, using: tokenizers)
    }

    /// Answer the next message of the conversation.
    public func answer(
        _ message: String, maxTokens: Int = 500, show: @escaping @Sendable (Frame) -> Void
    ) async throws {
        let conversation = conversation
        try await container.perform { context in
            if conversation.caches.isEmpty {
                conversation.caches = try context.model.newCache(parameters: nil)
            }
            let caches = conversation.caches
            let input = try await context.processor.prepare(
                input: UserInput(chat: [.user(message)]))
            let iterator = try TokenIterator(
                input: input, model: context.model, cache: caches,
                parameters: GenerateParameters(maxTokens: maxTokens, temperature: 0.6))
            var text = NaiveStreamingDetokenizer(tokenizer: context.tokenizer)
            var piece = "", count = 0
            let start = Date()
            for token in iterator {
                if token == context.tokenizer.eosTokenId { break }
                count += 1
                text.append(token: token)
                piece += text.next() ?? ""
                if count % Self.tokensPerFrame == 0 || Task.isCancelled {
                    show(frame(piece, caches, count, since: start))
                    piece = ""
                }
                if Task.isCancelled { break }
            }
            show(frame(piece, caches, count, since: start))
        }
    }
}

private func frame(
    _ text: String, _ caches: [any KVCache], _ count: Int, since start: Date
) -> ChatEngine.Frame {
    let tracking = caches.compactMap { $0 as? any H2OScoreTracking }
    let tokens = tracking.first?.offset ?? 0
    var held = Array(repeating: 0.0, count: tokens), heads = 0.0
    for cache in tracking {
        // A picture without a cache that cannot be read is better than none.
        for head in (try? cache.keptPositions())?.first ?? [] {
            heads += 1
            for position in head { held[position] += 1 }
        }
    }
    return ChatEngine.Frame(
        text: text, tokens: tokens, held: held.map { $0 / max(heads, 1) },
        nbytes: tracking.reduce(0) { $0 + $1.nbytes },
        tokensPerSecond: Double(count) / max(Date().timeIntervalSince(start), 1e-3))
}
