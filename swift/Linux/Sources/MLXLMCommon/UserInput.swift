import Foundation
import MLX

public typealias Message = [String: any Sendable]
public typealias ToolSpec = [String: any Sendable]

public enum Chat {
    /// Something said, by the user, the model, a tool or the app.
    public struct Message {
        public var role: Role
        public var content: String
        public var images: [UserInput.Image]
        public var videos: [UserInput.Video]
        public var tool: Tool?

        public struct Tool: Sendable {
            let id: String

            public static func result(id: String) -> Self { Self(id: id) }
        }

        public init(
            role: Role, content: String, images: [UserInput.Image] = [],
            videos: [UserInput.Video] = [], tool: Tool? = nil
        ) {
            (self.role, self.content, self.tool) = (role, content, tool)
            (self.images, self.videos) = (images, videos)
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

        public static func user(
            _ content: String, images: [UserInput.Image] = [], videos: [UserInput.Video] = []
        ) -> Self { Self(role: .user, content: content, images: images, videos: videos) }

        public static func tool(_ content: String, id: String? = nil) -> Self {
            Self(role: .tool, content: content, tool: id.map { .result(id: $0) })
        }
    }
}

/// What a processor makes an input for the model of.
public struct UserInput {
    public enum Image {
        case url(URL)
        case array(MLXArray)
    }

    public enum Video {
        case url(URL)
    }

    public struct Processing: Sendable {
        public var resize: CGSize?

        public init(resize: CGSize? = nil) { self.resize = resize }
    }

    public enum Prompt {
        case chat([Chat.Message])
    }

    public var prompt: Prompt
    public var images: [Image]
    public var videos: [Video]
    public var processing: Processing
    public var tools: [ToolSpec]?
    public var additionalContext: [String: any Sendable]?

    public init(
        chat: [Chat.Message], processing: Processing = .init(), tools: [ToolSpec]? = nil,
        additionalContext: [String: any Sendable]? = nil
    ) {
        prompt = .chat(chat)
        images = chat.flatMap(\.images)
        videos = chat.flatMap(\.videos)
        self.processing = processing
        self.tools = tools
        self.additionalContext = additionalContext
    }
}

public protocol UserInputProcessor: Sendable {
    func prepare(input: UserInput) async throws -> LMInput
}
