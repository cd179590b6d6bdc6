import Foundation

/// What swift/Examples/Chat uses of swift-transformers, for the compiler alone.
public protocol Tokenizer: Sendable {
    var bosToken: String? { get }
    var eosToken: String? { get }
    var unknownToken: String? { get }
    func encode(text: String, addSpecialTokens: Bool) -> [Int]
    func decode(tokens: [Int], skipSpecialTokens: Bool) -> String
    func convertTokenToId(_ token: String) -> Int?
    func convertIdToToken(_ id: Int) -> String?
    func applyChatTemplate(
        messages: [[String: any Sendable]], tools: [[String: any Sendable]]?,
        additionalContext: [String: any Sendable]?
    ) throws -> [Int]
}

public enum AutoTokenizer {
    public static func from(modelFolder: URL) async throws -> any Tokenizer {
        throw CocoaError(.featureUnsupported)
    }
}
