/// What a chat template is given for what was said.
public protocol MessageGenerator: Sendable {
    func generate(message: Chat.Message) -> Message
    func generate(messages: [Chat.Message]) -> [Message]
}

extension MessageGenerator {
    public func generate(message: Chat.Message) -> Message {
        ["role": message.role.rawValue, "content": message.content]
    }

    public func generate(messages: [Chat.Message]) -> [Message] {
        messages.map { generate(message: $0) }
    }
}

public struct DefaultMessageGenerator: MessageGenerator {
    public init() {}
}

/// For templates that refuse a system message.
public struct NoSystemMessageGenerator: MessageGenerator {
    public init() {}

    public func generate(messages: [Chat.Message]) -> [Message] {
        messages.filter { $0.role != .system }.map { generate(message: $0) }
    }
}
