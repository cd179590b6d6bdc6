import Foundation

public enum JSONValue: Hashable, Codable, Sendable {
    case int(Int)
    case string(String)

    public init(from decoder: any Decoder) throws {
        let container = try decoder.singleValueContainer()
        if let value = try? container.decode(Int.self) {
            self = .int(value)
        } else {
            self = .string(try container.decode(String.self))
        }
    }

    public func encode(to encoder: any Encoder) throws {
        var container = encoder.singleValueContainer()
        switch self {
        case .int(let value): try container.encode(value)
        case .string(let value): try container.encode(value)
        }
    }
}

/// A call of one of the app's tools by a model.
public struct ToolCall: Hashable, Codable, Sendable {
    public struct Function: Hashable, Codable, Sendable {
        public let name: String
        public let arguments: [String: JSONValue]
    }

    public let function: Function
    public let id: String?

    /// The call in a text `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
    init?(text: String) {
        let parts = text.components(separatedBy: "<tool_call>")
        guard parts.count == 2, parts[1].hasSuffix("</tool_call>"),
            let function = try? JSONDecoder().decode(
                Function.self, from: Data(parts[1].dropLast("</tool_call>".count).utf8))
        else { return nil }
        (self.function, id) = (function, nil)
    }
}
