import Foundation

/// Text to tokens, and back.
public protocol Tokenizer: Sendable {
    func encode(text: String, addSpecialTokens: Bool) -> [Int]
    func decode(tokenIds: [Int], skipSpecialTokens: Bool) -> String
    func convertTokenToId(_ token: String) -> Int?
    func convertIdToToken(_ id: Int) -> String?

    var bosToken: String? { get }
    var eosToken: String? { get }
    var unknownToken: String? { get }

    func applyChatTemplate(
        messages: [[String: any Sendable]], tools: [[String: any Sendable]]?,
        additionalContext: [String: any Sendable]?
    ) throws -> [Int]
}

extension Tokenizer {
    public func decode(tokenIds: [Int]) -> String {
        decode(tokenIds: tokenIds, skipSpecialTokens: false)
    }

    public var eosTokenId: Int? { eosToken.flatMap(convertTokenToId) }
    public var unknownTokenId: Int? { unknownToken.flatMap(convertTokenToId) }
}

public protocol TokenizerLoader: Sendable {
    func load(from directory: URL) async throws -> any Tokenizer
}

/// Tokens to text as they come.
public protocol StreamingDetokenizer: IteratorProtocol<String> {
    mutating func append(token: Int)
}

public struct NaiveStreamingDetokenizer: StreamingDetokenizer {
    private let tokenizer: any Tokenizer
    private var tokens: [Int] = []
    private var given = ""

    public init(tokenizer: any Tokenizer) { self.tokenizer = tokenizer }

    public mutating func append(token: Int) { tokens.append(token) }

    public mutating func next() -> String? {
        let text = tokenizer.decode(tokenIds: tokens)
        let new = text.dropFirst(given.count)
        if new.last == "\u{fffd}" { return nil }  // half a character
        given = text
        return String(new)
    }
}
