public typealias Message = [String: any Sendable]
public typealias ToolSpec = [String: any Sendable]

public enum Chat {
    /// Something said, by the user, the model or the app.
    public struct Message {
        public var role: Role
        public var content: String

        public init(role: Role, content: String) {
            (self.role, self.content) = (role, content)
        }

        public enum Role: String, Sendable {
            case user, assistant, system, tool
        }

        public static func system(_ content: String) -> Self {
            Self(role: .system, content: content)
        }

        public static func assistant(_ content: String) -> Self {
            Self(role: .assistant, content: content)
        }

        public static func user(_ content: String) -> Self { Self(role: .user, content: content) }
    }
}

/// What a processor makes an input for the model of.
public struct UserInput {
    public struct Processing: Sendable {
        public init() {}
    }

    public enum Prompt {
        case chat([Chat.Message])
    }

    public var prompt: Prompt
    public var tools: [ToolSpec]?
    public var additionalContext: [String: any Sendable]?

    public init(
        chat: [Chat.Message], processing: Processing = .init(), tools: [ToolSpec]? = nil,
        additionalContext: [String: any Sendable]? = nil
    ) {
        prompt = .chat(chat)
        self.tools = tools
        self.additionalContext = additionalContext
    }
}

public protocol UserInputProcessor: Sendable {
    func prepare(input: UserInput) async throws -> LMInput
}
