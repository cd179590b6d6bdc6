import Foundation
import MLXLMCommon
import Tokenizers

/// Tokenizers of swift-transformers, as mlx-swift-lm wants them.
public struct LocalTokenizers: TokenizerLoader {
    public init() {}

    public func load(from directory: URL) async throws -> any MLXLMCommon.Tokenizer {
        Bridge(tokenizer: try await AutoTokenizer.from(modelFolder: directory))
    }

    private struct Bridge: MLXLMCommon.Tokenizer, @unchecked Sendable {
        let tokenizer: any Tokenizers.Tokenizer

        var bosToken: String? { tokenizer.bosToken }
        var eosToken: String? { tokenizer.eosToken }
        var unknownToken: String? { tokenizer.unknownToken }

        func encode(text: String, addSpecialTokens: Bool) -> [Int] {
            tokenizer.encode(text: text, addSpecialTokens: addSpecialTokens)
        }

        func decode(tokenIds: [Int], skipSpecialTokens: Bool) -> String {
            tokenizer.decode(tokens: tokenIds, skipSpecialTokens: skipSpecialTokens)
        }

        func convertTokenToId(_ token: String) -> Int? { tokenizer.convertTokenToId(token) }
        func convertIdToToken(_ id: Int) -> String? { tokenizer.convertIdToToken(id) }

        func applyChatTemplate(
            messages: [[String: any Sendable]], tools: [[String: any Sendable]]?,
            additionalContext: [String: any Sendable]?
        ) throws -> [Int] {
            try tokenizer.applyChatTemplate(
                messages: messages, tools: tools, additionalContext: additionalContext)
        }
    }
}
